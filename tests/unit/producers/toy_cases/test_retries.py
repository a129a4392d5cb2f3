"""C11 of the design notes (gateway.md §4.1), and what else the connection of an earlier request says about an equal one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.records import CallDelivery, CallStarted, Delivery, ModelCall, Outcome, Terminal
from tests.unit.producers.fakes import AsgiClient, Play, Rig, started_gateway
from tests.unit.producers.toy_cases.toy import HI, ToyEngine, calls, finish, joined, output, prompts, say

CUT = Play([[10, 11, 10], [11, 2]], waits_after=1)
"""Three ids come; the rest waits."""
WHOLE = Play([[28, 2]])
BODY = {"model": "m", "messages": [HI]}
"""What `say` sends."""


async def until(condition: Any) -> None:
    """Let the loop run until something holds; a few seconds later it never will."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def by_hand(rig: Rig, opened: dict[str, Any], **values: Any) -> AsgiClient:
    path = opened["base_url"].removeprefix("http://gateway") + "/chat/completions"
    return AsgiClient(rig.gateway.app, path, opened["api_key"], json.dumps({**BODY, **values}).encode())


async def marked(rig: Rig, opened: dict[str, Any], tries: str = "1") -> Any:
    """Send again, with the word of OpenAI's and Anthropic's SDKs that it is a retry."""
    headers = {"authorization": f"Bearer {opened['api_key']}", "x-stainless-retry-count": tries}
    return await rig.http.post(opened["base_url"] + "/chat/completions", json=BODY, headers=headers)


def attempts(publisher: MemoryPublisher) -> list[tuple[int, int, Outcome, bool]]:
    """Each outcome's call, counted from 0, its attempt, how it ended, and whether it may be trained on."""
    names = list(dict.fromkeys(call.call_id for call in calls(publisher)))
    return [(names.index(c.call_id), c.call_attempt, c.outcome, c.trainable) for c in calls(publisher)]


async def test_c11_cut_stream_sent_again_is_one_call_and_what_comes_after_is_another(tmp_path: Path) -> None:
    """Cut after three ids, sent again without `stream` and with no word of a retry, then asked again after all was there."""
    async with started_gateway(tmp_path, engine=ToyEngine(CUT, WHOLE)) as rig:
        opened = await rig.open()
        cut = by_hand(rig, opened, stream=True)
        await rig.engine.is_waiting.wait()
        cut.left.set()
        await cut.task
        await say(rig, opened, HI)
        await say(rig, opened, HI)
        await finish(rig, opened)

        assert [
            (0, 0, Outcome.CLIENT_DISCONNECTED, False),
            (0, 1, Outcome.COMPLETED, True),
            (1, 0, Outcome.COMPLETED, True),
        ] == attempts(rig.publisher)
        assert [[10, 11, 10], [28, 2], [28, 2]] == [output(call) for call in calls(rig.publisher)]
        assert ((), 3) == (joined(rig.publisher.written).lost_call_ids, len(joined(rig.publisher.written).calls))


async def test_c11_equal_requests_at_once_are_two_calls(tmp_path: Path) -> None:
    """Nobody's sample is joined to another's."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[10], [2]], waits_after=1))) as rig:
        opened = await rig.open()
        both = [asyncio.create_task(say(rig, opened, HI)) for _ in range(2)]
        await until(lambda: len(rig.engine.requests) == 2)
        rig.engine.go.set()
        await asyncio.gather(*both)

        assert [(0, 0, Outcome.COMPLETED, True), (1, 0, Outcome.COMPLETED, True)] == attempts(rig.publisher)


async def test_retry_may_come_before_the_first_attempt_is_recorded(tmp_path: Path) -> None:
    """Harnesses send again at once, while Kafka has yet to acknowledge what the cut left behind."""
    async with started_gateway(tmp_path, engine=ToyEngine(CUT, WHOLE), ack_timeout_s=30) as rig:
        opened = await rig.open()
        cut = by_hand(rig, opened, stream=True)
        await rig.engine.is_waiting.wait()
        rig.publisher.held = True
        cut.left.set()
        await cut.task
        again = asyncio.create_task(say(rig, opened, HI))
        await until(lambda: len(rig.publisher.queued) == 2)
        queued = rig.publisher.queued
        rig.publisher.release()
        await again

        assert {ModelCall, CallStarted} == {type(record) for record in queued}
        assert {(0, 0), (0, 1)} == {attempt[:2] for attempt in attempts(rig.publisher)}


async def test_marked_retry_takes_the_place_of_an_open_attempt(tmp_path: Path) -> None:
    """The client timed out and says so; its old connection still looks open. The engine stops, and what it sampled is kept."""
    async with started_gateway(tmp_path, engine=ToyEngine(CUT, WHOLE)) as rig:
        opened = await rig.open()
        first = by_hand(rig, opened)
        await rig.engine.is_waiting.wait()
        answer = await marked(rig, opened)
        await first.task

        assert (200, 503, "retried") == (
            answer.status_code, first.sent[0]["status"], json.loads(first.body)["error"]["code"],
        )  # fmt: skip
        assert rig.engine.is_cancelled
        assert {(0, 0, Outcome.CLIENT_DISCONNECTED, False), (0, 1, Outcome.COMPLETED, True)} == set(
            attempts(rig.publisher)
        )


async def test_marked_retry_of_a_sampled_answer_withdraws_it(tmp_path: Path) -> None:
    """The first attempt waits for Kafka; its client gets the second answer and never the first."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[10, 2]]), WHOLE), ack_timeout_s=30) as rig:
        opened = await rig.open()
        original = rig.engine.generate

        async def generate_then_hold(*arguments: Any) -> None:
            await original(*arguments)
            rig.publisher.held = True

        rig.engine.generate = generate_then_hold  # type: ignore[method-assign]
        first = by_hand(rig, opened)
        await until(lambda: rig.publisher.held and rig.publisher.queued)
        rig.engine.generate = original  # type: ignore[method-assign]
        again = asyncio.create_task(marked(rig, opened))
        await until(lambda: len(rig.publisher.queued) == 2)
        rig.publisher.release()
        answer = await again
        await first.task
        await say(rig, opened, HI, {"role": "assistant", "content": "ok"}, HI)

        (withdrawn,) = (record for record in rig.publisher.records if isinstance(record, CallDelivery))
        assert (200, "ok", 503) == (
            answer.status_code, answer.json()["choices"][0]["message"]["content"], first.sent[0]["status"],
        )  # fmt: skip
        assert (0, Delivery.NONE, "retried") == (withdrawn.call_attempt, withdrawn.delivered, withdrawn.reason)
        assert [*prompts(rig.publisher)[1], 28, 2] == prompts(rig.publisher)[2][:11]


async def test_first_request_of_a_client_is_no_retry(tmp_path: Path) -> None:
    """The SDKs send their counter with every request; 0 says nothing."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[10], [2]], waits_after=1))) as rig:
        opened = await rig.open()
        both = [asyncio.create_task(marked(rig, opened, "0")) for _ in range(2)]
        await until(lambda: len(rig.engine.requests) == 2)
        rig.engine.go.set()
        await asyncio.gather(*both)

        assert 2 == len({call.call_id for call in calls(rig.publisher)})


async def test_answer_that_broke_off_is_partly_delivered(tmp_path: Path) -> None:
    """The connection broke while the end was sent: nobody knows how much came, so the same again is another call."""

    class BreakingClient(AsgiClient):
        async def _send(self, message: Any) -> None:
            if message.get("body"):
                raise OSError("broken pipe")

    async with started_gateway(tmp_path, engine=ToyEngine(WHOLE)) as rig:
        opened = await rig.open()
        path = opened["base_url"].removeprefix("http://gateway") + "/chat/completions"
        client = BreakingClient(rig.gateway.app, path, opened["api_key"], json.dumps(BODY).encode())
        await asyncio.wait([client.task])
        await until(lambda: isinstance(rig.publisher.records[-1], CallDelivery))
        broken = rig.publisher.records[-1]
        await say(rig, opened, HI)

        assert isinstance(client.task.exception(), OSError)
        assert isinstance(broken, CallDelivery)
        assert (calls(rig.publisher)[0].call_id, Delivery.PARTIAL) == (broken.call_id, broken.delivered)
        assert 2 == len({call.call_id for call in calls(rig.publisher)})


async def test_attempt_that_never_began_leaves_its_number(tmp_path: Path) -> None:
    """The engine was away at the second try, and nothing was written: the third is the second attempt."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play(fails_after=1), WHOLE)) as rig:
        opened = await rig.open()
        failed = await rig.chat(opened)
        rig.engine.is_down = True
        down = await rig.chat(opened)
        rig.engine.is_down = False
        await say(rig, opened, HI)

        assert (502, 503) == (failed.status_code, down.status_code)
        assert [(0, 0), (0, 1)] == [attempt[:2] for attempt in attempts(rig.publisher)]


async def test_end_of_a_rollout_waits_for_calls_that_were_left(tmp_path: Path) -> None:
    """An agent is killed and its harness finishes the rollout at once: the outcome is not late."""

    class SlowToStop(ToyEngine):
        async def generate(self, *arguments: Any) -> None:
            try:
                await super().generate(*arguments)
            except asyncio.CancelledError:
                await self.go.wait()
                raise

    engine = SlowToStop(CUT)
    async with started_gateway(tmp_path, engine=engine, ack_timeout_s=30) as rig:
        opened = await rig.open()
        killed = by_hand(rig, opened)
        await engine.is_waiting.wait()
        killed.left.set()
        await killed.task
        end = asyncio.create_task(finish(rig, opened))
        await until(lambda: engine.is_cancelled)
        engine.go.set()
        await end

        kinds = [type(record) for record in rig.publisher.records]
        assert kinds.index(ModelCall) < kinds.index(Terminal)
        assert () == joined(rig.publisher.written).lost_call_ids
