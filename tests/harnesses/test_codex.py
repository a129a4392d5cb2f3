"""Codex: two rollouts of one group, the second with everything that goes wrong on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollstream.schemas.records import Outcome
from tests.harnesses.script import BUSY, CUT, Script, calls, found
from tests.harnesses.world import HarnessWorld, audit_records, harness_world, play_two
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play

COMMAND = ("codex", "exec", "--skip-git-repo-check", "--strict-config", "--dangerously-bypass-approvals-and-sandbox")
SUB_AGENT = "Count the lines"
READ = calls(("exec_command", {"cmd": "cat notes.txt"}))

SCRIPT = {
    "Add the numbers": [
        READ,
        calls(("exec_command", {"cmd": "echo 42 > answer.txt"})),
        Play("I wrote 42."),
    ],
    "Sum the numbers": [
        CUT,
        READ,
        BUSY,
        calls(("multi_agent_v1__spawn_agent", {"message": f"{SUB_AGENT} of notes.txt"})),
        lambda asked: calls(
            (
                "multi_agent_v1__wait_agent",
                {"targets": [found(r'"agent_id": ?"([^"]+)"', asked)], "timeout_ms": 60_000},
            )
        ),
        calls(("exec_command", {"cmd": "echo 41 > answer.txt"})),
        Play("I wrote 41."),
    ],
    SUB_AGENT: [calls(("exec_command", {"cmd": "wc -l notes.txt"})), Play("It has two lines.")],
}


def test_codex_plays_its_tools_in_one_rollout_each_and_the_audit_is_clean(programs: Path, tmp_path: Path) -> None:
    """Two tools; then a cut answer, a busy engine, and a sub-agent whose calls are calls of the same rollout."""
    script = Script(SCRIPT)

    async def play() -> HarnessWorld:
        async with harness_world(tmp_path, ScriptedEngine(plan=script), programs) as world:
            await play_two(world, script, COMMAND)
        return world

    world = asyncio.run(play())
    audited = audit_records(world.served, tmp_path)

    plain, rough = world.calls("r-plain"), world.calls("r-rough")
    assert {"openai-responses"} == {call.protocol for call in (*plain, *rough)}
    assert [(0, Outcome.COMPLETED, True)] * 3 == [(c.call_attempt, c.outcome, c.trainable) for c in plain]
    assert (7, 9, 2) == (
        len({call.call_id for call in rough}),
        len(rough),
        len([call for call in rough if call.outcome is Outcome.UPSTREAM_ERROR and call.call_attempt == 0]),
    )
    assert ("succeeded", 1.0) == (world.end("r-plain")[0], world.end("r-plain")[1]["reward"])
    assert ("failed", 0.0) == (world.end("r-rough")[0], world.end("r-rough")[1]["reward"])
    assert audited.is_clean, audited.report
    assert 10 == audited.report["counts"]["calls in samples"]
    assert {"r-plain": {1.0}, "r-rough": {-1.0}} == audited.advantages
