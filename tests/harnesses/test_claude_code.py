"""Claude Code: two rollouts of one group, the second with everything that goes wrong on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollstream.schemas.records import Outcome
from tests.harnesses.script import BUSY, CUT, Script, calls
from tests.harnesses.world import HarnessWorld, audit_records, harness_world, play_two
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play

COMMAND = ("claude", "--permission-mode", "acceptEdits", "--allowedTools", "Bash,Read,Write,Agent", "-p")
READ = calls(("Bash", {"command": "cat notes.txt", "description": "Read the notes"}))
SUB_AGENTS = {word: f"Count the {word}" for word in ("lines", "words")}


def _sub_agent(word: str) -> tuple[str, dict[str, str]]:
    prompt = f"{SUB_AGENTS[word]} of notes.txt."
    return "Agent", {"description": SUB_AGENTS[word], "prompt": prompt, "subagent_type": "general-purpose"}


def _count(option: str) -> list[Play]:
    return [calls(("Bash", {"command": f"wc {option} notes.txt", "description": "Count"})), Play("There are two.")]


def _script(folder: Path) -> Script:
    def write(rollout_id: str, answer: int) -> Play:
        return calls(("Write", {"file_path": str(folder / rollout_id / "answer.txt"), "content": f"{answer}\n"}))

    return Script(
        {
            "Add the numbers": [READ, write("r-plain", 42), Play("I wrote 42.")],
            "Sum the numbers": [
                CUT,
                READ,
                BUSY,
                calls(_sub_agent("lines"), _sub_agent("words")),
                write("r-rough", 41),
                Play("I wrote 41."),
            ],
            SUB_AGENTS["lines"]: _count("-l"),
            SUB_AGENTS["words"]: _count("-w"),
        }
    )


def test_claude_code_plays_its_tools_in_one_rollout_each_and_the_audit_is_clean(
    programs: Path, tmp_path: Path
) -> None:
    """Two tools; then a cut answer, a busy engine, and two sub-agents at once whose calls are calls of the same rollout."""
    script = _script(tmp_path)

    async def play() -> HarnessWorld:
        async with harness_world(tmp_path, ScriptedEngine(plan=script), programs) as world:
            await play_two(world, script, COMMAND)
        return world

    world = asyncio.run(play())
    audited = audit_records(world.served, tmp_path)

    plain, rough = world.calls("r-plain"), world.calls("r-rough")
    assert {"anthropic-messages"} == {call.protocol for call in (*plain, *rough)}
    assert [(0, Outcome.COMPLETED, True)] * 3 == [(c.call_attempt, c.outcome, c.trainable) for c in plain]
    assert (8, 10, 2) == (
        len({call.call_id for call in rough}),
        len(rough),
        len([call for call in rough if call.outcome is Outcome.UPSTREAM_ERROR and call.call_attempt == 0]),
    )
    assert ("succeeded", 1.0) == (world.end("r-plain")[0], world.end("r-plain")[1]["reward"])
    assert ("failed", 0.0) == (world.end("r-rough")[0], world.end("r-rough")[1]["reward"])
    assert audited.is_clean, audited.report
    assert 11 == audited.report["counts"]["calls in samples"]
    assert {"r-plain": {1.0}, "r-rough": {-1.0}} == audited.advantages
