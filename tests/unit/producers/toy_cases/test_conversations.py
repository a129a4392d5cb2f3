"""What a rollout's calls are to each other: sub-agents, a gateway that forgot, a replica, an intent alone, repeated records."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rollstream.processors.rows import lay_out
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.records import CallStarted, ClosedBy, ModelCall
from tests.unit.producers.fakes import Play, started_gateway
from tests.unit.producers.toy_cases.toy import HI, ToyEngine, calls, finish, joined, prompts, say

A, B = ({"role": "user", "content": text} for text in ("a", "b"))
"""What two agents are asked."""


async def test_two_sub_agents_at_once_are_written_each_against_its_own_tail(tmp_path: Path) -> None:
    """Their calls come mixed, in one rollout with one key; each conversation is one row."""
    engine = ToyEngine(Play([[28, 2]]))
    async with started_gateway(tmp_path, engine=engine) as rig:
        opened = await rig.open()
        talks: dict[str, list[dict[str, Any]]] = {"a": [HI, A], "b": [HI, B]}
        for _ in range(3):
            answers = await asyncio.gather(*(say(rig, opened, *talk) for talk in talks.values()))
            for talk, answer in zip(talks.values(), answers, strict=True):
                talk += [answer, HI]
        await finish(rig, opened)

        found = calls(rig.publisher)
        bases = [call.prompt.base_call_id for call in found]
        assert [None, *(call.call_id for call in found[:4])] == [bases[0], *bases[2:]]
        assert sorted(request[0] for request in engine.requests) == sorted(prompts(rig.publisher))
        rows, masked = lay_out(joined(rig.publisher.written), "merge", {})
        assert ([3, 3], []) == ([len(row.calls) for row in rows], masked)


async def test_gateway_that_was_started_again_writes_the_next_prompt_whole(tmp_path: Path) -> None:
    """It knows no base; the key still opens the rollout, indexes go on rising, and the row is one."""
    publisher, engine = MemoryPublisher(), ToyEngine(Play([[28, 2]]))
    async with started_gateway(tmp_path, engine=engine, publisher=publisher) as first:
        opened = await first.open()
        answer = await say(first, opened, HI)
    async with started_gateway(tmp_path, engine=engine, publisher=publisher) as second:
        second.now[0] += 5_000
        answer_2 = await say(second, opened, HI, answer, A)
        await say(second, opened, HI, answer, A, answer_2, B)
        await finish(second, opened)

    found = calls(publisher)
    assert [None, None, found[1].call_id] == [call.prompt.base_call_id for call in found]
    assert found[0].call_index < found[1].call_index < found[2].call_index
    assert [request[0] for request in engine.requests] == prompts(publisher)
    rows, _ = lay_out(joined(publisher.written), "merge", {})
    assert [3] == [len(row.calls) for row in rows]


async def test_calls_of_a_rollout_may_go_to_any_replica(tmp_path: Path) -> None:
    """Each writes against what it has seen itself; all prompts come back, and a retry elsewhere is a new call."""
    publisher, engine = MemoryPublisher(), ToyEngine(Play([[28, 2]]))
    async with (
        started_gateway(tmp_path / "one", engine=engine, publisher=publisher) as one,
        started_gateway(tmp_path / "other", engine=engine, publisher=publisher) as other,
    ):
        opened = await one.open()
        talk: list[dict[str, Any]] = [HI]
        for at, rig in enumerate([one, other, other, one, other]):
            for each in (one, other):
                each.now[0] += 100
            talk += [await say(rig, opened, *talk), (A, B)[at % 2]]
        engine.plays = [Play(fails_after=0), Play([[28, 2]])]
        failed = await one.chat(opened, messages=[HI])
        await say(other, opened, HI)
        await finish(other, opened)

    found = calls(publisher)
    assert [request[0] for request in engine.requests] == prompts(publisher)
    assert {None, found[0].call_id} >= {call.prompt.base_call_id for call in found[:4:3]}
    assert (502, 7, {0}) == (failed.status_code, len({c.call_id for c in found}), {c.call_attempt for c in found})
    rows, masked = lay_out(joined(publisher.written), "merge", {})
    assert ([5, 1], ["not_completed"]) == ([len(row.calls) for row in rows], [call.reason for call in masked])


async def test_intent_without_an_outcome_is_a_lost_call(tmp_path: Path) -> None:
    """The gateway dies while the engine works: the call is there, and says that it is lost."""
    engine = ToyEngine(Play([[28, 2]]), Play([[10], [2]], waits_after=1))
    async with started_gateway(tmp_path, engine=engine) as rig:
        opened = await rig.open()
        await say(rig, opened, HI)
        left = asyncio.create_task(rig.chat(opened, messages=[HI, A]))
        await engine.is_waiting.wait()
        before_death = list(rig.publisher.written)
        engine.go.set()
        await left

    started = [record for _, record in before_death if isinstance(record, CallStarted)]
    rollout = joined(before_death, until_ms=lambda last_ms: last_ms + 3_600_000)
    assert (ClosedBy.DEADLINE, (started[1].call_id,)) == (rollout.closed_by, rollout.lost_call_ids)
    rows, masked = lay_out(rollout, "merge", {})
    assert (1, [(started[1].call_id, "lost")]) == (len(rows), [(call.call_id, call.reason) for call in masked])


async def test_records_that_come_twice_count_once(tmp_path: Path) -> None:
    """Kafka may store a record again; its identity is call and attempt."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play(fails_after=1), Play([[28, 2]]))) as rig:
        opened = await rig.open()
        await rig.chat(opened)
        await say(rig, opened, HI)
        await finish(rig, opened)
        written = rig.publisher.written

    once = joined(written)
    twice = joined(
        [pair for pair in written for _ in range(2 if isinstance(pair[1], ModelCall | CallStarted) else 1)]
    )
    assert (once, 2) == (twice, len(once.calls))
