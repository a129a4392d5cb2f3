"""`rollstream run` with a script of one's own, whose clients are made without an address or a key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rollstream.schemas.records import EnvironmentEvent, EventKind
from tests.harnesses.script import Script, calls
from tests.harnesses.world import HarnessWorld, audit_records, harness_world
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play

AGENT = """
import json
import sys
from pathlib import Path

import anthropic
import openai
from google import genai

question = sys.argv[1]
tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("read", "write")]
messages = [{"role": "user", "content": question}]
client = openai.OpenAI()
while True:
    message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        path, text = Path("notes.txt"), None
        if call.function.name == "write":
            text = json.loads(call.function.arguments)["text"]
            Path("answer.txt").write_text(text)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text or path.read_text()})
asked = [{"role": "user", "content": "Was it hard?"}]
said = anthropic.Anthropic().messages.create(model="policy", max_tokens=99, messages=asked).content[0].text
google = genai.Client()
said += google.models.generate_content(model="policy", contents="And now?").text
print(said)
"""


def _script() -> Script:
    return Script(
        {
            "Add the numbers": [calls(("read", {})), calls(("write", {"text": "42"})), Play("done")],
            "Sum the numbers": [calls(("read", {})), calls(("write", {"text": "41"})), Play("done")],
            "Was it hard?": [Play("No."), Play("No.")],
            "And now?": [Play("Tea."), Play("Tea.")],
        }
    )


async def _play(folder: Path, script: Script) -> HarnessWorld:
    (folder / "agent.py").write_text(AGENT)
    async with harness_world(folder, ScriptedEngine(plan=script)) as world:

        async def run(rollout_id: str, question: str) -> int:
            (world.work(rollout_id) / "notes.txt").write_text("40 2")
            return await world.run(
                rollout_id, "--check", "grep -x 42 answer.txt", "python", str(folder / "agent.py"), question
            )

        codes = await asyncio.gather(run("r-right", "Add the numbers."), run("r-wrong", "Sum the numbers."))
        assert [0, 1] == codes, world.output
    return world


def test_script_plays_its_tools_in_one_rollout_and_the_audit_is_clean(tmp_path: Path) -> None:
    """Three official clients find the rollout by themselves; the check gives the reward, and a trainer gets samples of both."""
    script = _script()

    world = asyncio.run(_play(tmp_path, script))
    audited = audit_records(world.served, tmp_path)

    protocols = ["openai-chat"] * 3 + ["anthropic-messages", "google-generate"]
    assert ([], []) == (script.unknown, [left for left in script.left.values() if left])
    assert {"r-right": protocols, "r-wrong": protocols} == {
        rollout_id: [call.protocol for call in world.calls(rollout_id)] for rollout_id in ("r-right", "r-wrong")
    }
    assert ("succeeded", {"reward": 1.0, "exit_code": 0, "check_exit_code": 0}) == world.end("r-right")
    assert ("failed", {"reward": 0.0, "exit_code": 0, "check_exit_code": 1}) == world.end("r-wrong")
    assert "No.Tea." in world.output["r-right"]
    events = [record for record in world.served.publisher.records if isinstance(record, EnvironmentEvent)]
    assert [(EventKind.ARTIFACT, "42\n"), (EventKind.ARTIFACT, "")] == [
        (event.kind, json.loads(event.content)["output"]) for event in sorted(events, key=lambda one: one.rollout_id)
    ]
    assert audited.is_clean, audited.report
    assert 10 == audited.report["counts"]["calls in samples"]
    assert {"r-right": {1.0}, "r-wrong": {-1.0}} == audited.advantages
