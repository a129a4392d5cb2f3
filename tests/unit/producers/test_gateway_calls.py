"""Model calls through the gateway's HTTP, over a scripted engine and an in-memory log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.engines.base import LabelSpan
from rollstream.producers.memory import MemoryPublisher
from rollstream.producers.spool import Spool
from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import CallDelivery, CallStarted, Delivery, ModelCall, Outcome, RolloutOpened
from rollstream.schemas.types import unpack_floats, unpack_ids
from tests.unit.producers.fakes import PROMPT, AsgiClient, Play, Rig, identity, started_gateway

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


def calls(publisher: MemoryPublisher) -> list[ModelCall]:
    return [record for record in publisher.records if isinstance(record, ModelCall)]


def by_hand(rig: Rig, opened: dict[str, Any], body: bytes) -> AsgiClient:
    path = opened["base_url"].removeprefix("http://gateway") + "/chat/completions"
    return AsgiClient(rig.gateway.app, path, opened["api_key"], body)


async def until(condition: Any) -> None:
    """Let the loop run until something holds; a few seconds later it never will."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_call_is_answered_and_recorded_exactly(tmp_path: Path) -> None:
    """The record holds the ids, log-probabilities and version that the engine reported, and the message shown."""
    async with started_gateway(tmp_path, Play([[28], [2]])) as rig:
        answer = await rig.chat(await rig.open(group_id="g-1", group_size=4), temperature=0.7, seed=5)

        opened, started, call = rig.publisher.records
        assert isinstance(opened, RolloutOpened)
        assert isinstance(started, CallStarted)
        assert isinstance(call, ModelCall)
        body = answer.json()
        assert (200, "ok", "stop", call.call_id) == (
            answer.status_code, body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"], body["id"],
        )  # fmt: skip
        assert {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11} == body["usage"]
        assert (list(PROMPT), [28, 2]) == (
            unpack_ids(call.prompt.suffix).tolist(),
            unpack_ids(call.output_ids).tolist(),
        )
        assert [-0.5, -0.5] == unpack_floats(call.output_logprobs).tolist()
        assert (True, (), Outcome.COMPLETED, "g-1", 0.7, 5) == (
            call.trainable, call.defects, call.outcome, call.group_id, call.sampling.temperature, call.sampling.seed,
        )  # fmt: skip
        assert (started.call_id, started.prompt_digest) == (call.call_id, call.prompt.digest)
        assert "ok" == json.loads(call.message)["content"]


async def test_streamed_answer_says_the_same(tmp_path: Path) -> None:
    """A stream carries the same text and finish, ends with [DONE], and its record differs in nothing that matters."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        plain = (await rig.chat(opened)).json()
        streamed = await rig.chat(opened, stream=True, stream_options={"include_usage": True})

        lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        events = [json.loads(line) for line in lines[:-1]]
        deltas = [event["choices"][0] for event in events if event["choices"]]
        assert "[DONE]" == lines[-1]
        assert plain["choices"][0]["message"]["content"] == "".join(d["delta"].get("content", "") for d in deltas)
        assert plain["choices"][0]["finish_reason"] == deltas[-1]["finish_reason"]
        assert plain["usage"] == events[-1]["usage"]
        first, second = calls(rig.publisher)
        assert (first.output_ids, first.output_logprobs) == (second.output_ids, second.output_logprobs)


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_end_is_sent_only_after_the_acknowledgement(tmp_path: Path, body: bytes) -> None:
    """While Kafka holds the outcome's acknowledgement back the client sees no event but signs of life."""
    async with started_gateway(tmp_path, Play(), ack_timeout_s=30) as rig:
        opened = await rig.open()
        engine = rig.engine
        original = engine.generate

        async def generate_then_hold(*arguments: Any) -> None:
            await original(*arguments)
            rig.publisher.held = True

        engine.generate = generate_then_hold  # type: ignore[method-assign]
        client = by_hand(rig, opened, body)
        await until(lambda: any(isinstance(record, ModelCall) for record in rig.publisher.queued))
        await until(lambda: body != STREAM or b": working" in client.body)
        for _ in range(100):  # turns of the loop in which an answer that does not wait would go out
            await asyncio.sleep(0)
        before = client.body
        rig.publisher.release()
        await client.task

        assert b"" == before.replace(b": working\n\n", b"")
        assert (b"ok" in client.body, 1) == (True, len(calls(rig.publisher)))
        assert (body == STREAM) == (b": working" in before)


async def test_intent_is_acknowledged_before_the_engine_is_asked(tmp_path: Path) -> None:
    """Without Kafka no token is sampled: a retryable 503, and behind the intent stands that nothing came of it."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        rig.publisher.held = True
        answer = await rig.chat(opened)
        rig.publisher.release()

        assert (503, "2", "ack_timeout") == (
            answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"],
        )  # fmt: skip
        assert [] == rig.engine.requests
        assert ["CallStarted", "ModelCall"] == [type(record).__name__ for record in rig.publisher.records[1:]]
        assert Outcome.REJECTED == calls(rig.publisher)[0].outcome


async def test_outcome_that_is_not_acknowledged_is_spooled_and_replayed(tmp_path: Path) -> None:
    """The client gets a retryable error, the sampled tokens are on disk, and the next start writes them to Kafka."""
    async with started_gateway(tmp_path, Play(spans=(LabelSpan(0, 2, "4"),))) as rig:
        opened = await rig.open()
        original = rig.engine.generate

        async def generate_then_break(*arguments: Any) -> None:
            await original(*arguments)
            rig.publisher.held = True

        rig.engine.generate = generate_then_break  # type: ignore[method-assign]
        answer = await rig.chat(opened)
        rig.engine.generate = original  # type: ignore[method-assign]

        assert (503, "2") == (answer.status_code, answer.headers["retry-after"])
        assert 2 == (await rig.admin.get("/stats")).json()["spooled"]

    async with started_gateway(tmp_path) as later:
        await later.open("r-2")
        call, correction = later.publisher.records[:2]
        assert isinstance(call, ModelCall)
        assert isinstance(correction, CallDelivery)
        assert ([28, 2], 4) == (unpack_ids(call.output_ids).tolist(), call.version_spans[0].version)
        assert (call.call_id, Delivery.NONE, "ack_timeout") == (
            correction.call_id, correction.delivered, correction.reason,
        )  # fmt: skip
        await until(lambda: not Spool(tmp_path / "spool").files())


async def test_correction_follows_a_late_outcome_even_if_the_disk_refuses(tmp_path: Path) -> None:
    """The client was told that nothing happened; without the correction the call would be trained on."""
    (tmp_path / "spool").write_text("no folder")
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        original = rig.engine.generate

        async def generate_then_break(*arguments: Any) -> None:
            await original(*arguments)
            rig.publisher.held = True

        rig.engine.generate = generate_then_break  # type: ignore[method-assign]
        answer = await rig.chat(opened)
        rig.publisher.release()

        call, correction = rig.publisher.records[-2:]
        assert isinstance(call, ModelCall)
        assert isinstance(correction, CallDelivery)
        assert (503, call.call_id, Delivery.NONE) == (answer.status_code, correction.call_id, correction.delivered)


async def test_connection_that_breaks_when_the_call_has_ended_gets_a_correction(tmp_path: Path) -> None:
    """The outcome says that the client may have it; nothing of it was sent."""
    async with started_gateway(tmp_path, Play(waits_after=0), ack_timeout_s=30) as rig:

        class BreakingClient(AsgiClient):
            async def _send(self, message: Any) -> None:
                if message.get("body"):  # the first sign of life
                    rig.engine.go.set()
                    await until(lambda: calls(rig.publisher) and rig.gateway.metrics.in_flight == 0)
                    raise OSError("broken pipe")

        opened = await rig.open()
        path = opened["base_url"].removeprefix("http://gateway") + "/chat/completions"
        client = BreakingClient(rig.gateway.app, path, opened["api_key"], STREAM)
        await asyncio.wait([client.task])
        await until(lambda: isinstance(rig.publisher.records[-1], CallDelivery))

        correction = rig.publisher.records[-1]
        assert isinstance(client.task.exception(), OSError)
        assert isinstance(correction, CallDelivery)
        assert (calls(rig.publisher)[0].call_id, Delivery.NONE) == (correction.call_id, correction.delivered)


async def test_late_acknowledgement_empties_the_spool(tmp_path: Path) -> None:
    """When the broker comes back, outcome and correction stand in order and nothing is left to replay."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        original = rig.engine.generate

        async def generate_then_break(*arguments: Any) -> None:
            await original(*arguments)
            rig.publisher.held = True

        rig.engine.generate = generate_then_break  # type: ignore[method-assign]
        await rig.chat(opened)
        rig.publisher.release()
        await until(lambda: not Spool(tmp_path / "spool").files())

        assert ["ModelCall", "CallDelivery"] == [type(record).__name__ for record in rig.publisher.records[-2:]]


async def test_retry_of_what_did_not_arrive_is_another_attempt_of_the_same_call(tmp_path: Path) -> None:
    """Failed, sent again, delivered, sent again: one call with two attempts, then a new call."""
    async with started_gateway(tmp_path, Play(fails_after=1), Play()) as rig:
        opened = await rig.open()
        statuses = [(await rig.chat(opened)).status_code for _ in range(3)]

        first, second, third = calls(rig.publisher)
        assert [502, 200, 200] == statuses
        assert (first.call_id, 0, 1) == (second.call_id, first.call_attempt, second.call_attempt)
        assert (0, False) == (third.call_attempt, third.call_id == first.call_id)
        assert [f"{first.call_id}-0", f"{first.call_id}-1"] == [request[2] for request in rig.engine.requests[:2]]


async def test_equal_requests_at_once_are_two_calls(tmp_path: Path) -> None:
    """A script that asks twice for two samples gets two calls."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        await asyncio.gather(rig.chat(opened), rig.chat(opened))

        first, second = calls(rig.publisher)
        assert (False, 0, 0) == (first.call_id == second.call_id, first.call_attempt, second.call_attempt)


async def test_engine_that_dies_mid_call_leaves_its_tokens_and_no_stop(tmp_path: Path) -> None:
    """The client gets an error, never a made-up end; the record holds what was sampled, not trainable."""
    async with started_gateway(tmp_path, Play([[10], [11]], fails_after=2)) as rig:
        answer = await rig.chat(await rig.open())

        (call,) = calls(rig.publisher)
        assert (502, "engine_error") == (answer.status_code, answer.json()["error"]["code"])
        assert (Outcome.UPSTREAM_ERROR, [10, 11], False, Delivery.NONE) == (
            call.outcome, unpack_ids(call.output_ids).tolist(), call.trainable, call.delivered,
        )  # fmt: skip


async def test_engine_that_dies_after_the_stream_began_ends_it_with_an_error(tmp_path: Path) -> None:
    """Once signs of life were sent the error is an event, and no [DONE] follows."""
    async with started_gateway(tmp_path, Play(waits_after=1, fails_after=1)) as rig:
        client = by_hand(rig, await rig.open(), STREAM)
        await until(lambda: b": working" in client.body)
        rig.engine.go.set()
        await client.task

        last = client.body.decode().split("\n\n")[-2]
        assert "engine_error" == json.loads(last.removeprefix("data: "))["error"]["code"]
        assert b"[DONE]" not in client.body


async def test_engine_that_is_down_is_a_retryable_error_and_no_call(tmp_path: Path) -> None:
    """Nothing was rendered, so nothing is recorded."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        rig.engine.is_down = True
        answer = await rig.chat(opened)
        health = await rig.http.get("/health")

        assert (503, "engine_down", 1, 503) == (
            answer.status_code, answer.json()["error"]["code"], len(rig.publisher.records), health.status_code,
        )  # fmt: skip


async def test_abort_is_an_error_and_not_trainable(tmp_path: Path) -> None:
    """An engine that aborts for new weights answers 200 with part of the ids; the client is told to come again."""
    async with started_gateway(tmp_path, Play([[10]], reason="abort")) as rig:
        answer = await rig.chat(await rig.open())

        (call,) = calls(rig.publisher)
        assert (503, Outcome.ABORTED, False) == (answer.status_code, call.outcome, call.trainable)


async def test_client_that_leaves_stops_the_engine_and_its_tokens_are_kept(tmp_path: Path) -> None:
    """The engine's work is cancelled, and the record says who left and what had come."""
    async with started_gateway(tmp_path, Play([[10], [11]], waits_after=1)) as rig:
        client = by_hand(rig, await rig.open(), BODY)
        await rig.engine.is_waiting.wait()
        client.left.set()
        await client.task
        await until(lambda: calls(rig.publisher))

        (call,) = calls(rig.publisher)
        assert rig.engine.is_cancelled
        assert (Outcome.CLIENT_DISCONNECTED, [10], Delivery.NONE, False) == (
            call.outcome, unpack_ids(call.output_ids).tolist(), call.delivered, call.trainable,
        )  # fmt: skip


async def test_call_that_the_process_cuts_off_is_recorded(tmp_path: Path) -> None:
    """Stopped while the engine works: the outcome is written before the process ends."""
    async with started_gateway(tmp_path, Play([[10], [11]], waits_after=1)) as rig:
        client = by_hand(rig, await rig.open(), BODY)
        await rig.engine.is_waiting.wait()
        client.task.cancel()

    (call,) = calls(rig.publisher)
    assert (Outcome.CLIENT_DISCONNECTED, [10]) == (call.outcome, unpack_ids(call.output_ids).tolist())


async def test_client_that_leaves_after_sampling_gets_a_correction(tmp_path: Path) -> None:
    """The outcome stands as it was; behind it stands that nobody saw it."""
    async with started_gateway(tmp_path, ack_timeout_s=30) as rig:
        opened = await rig.open()
        original = rig.engine.generate

        async def generate_then_hold(*arguments: Any) -> None:
            await original(*arguments)
            rig.publisher.held = True

        rig.engine.generate = generate_then_hold  # type: ignore[method-assign]
        client = by_hand(rig, opened, BODY)
        await until(lambda: rig.publisher.held)
        await asyncio.sleep(0.01)
        client.left.set()
        await client.task
        rig.publisher.release()
        await until(lambda: isinstance(rig.publisher.records[-1], CallDelivery))

        call, correction = rig.publisher.records[-2:]
        assert isinstance(call, ModelCall)
        assert isinstance(correction, CallDelivery)
        assert (Outcome.COMPLETED, True, Delivery.NONE, "client_disconnected") == (
            call.outcome, call.trainable, correction.delivered, correction.reason,
        )  # fmt: skip


async def test_prompt_beyond_the_context_is_refused_and_recorded(tmp_path: Path) -> None:
    """A 400 that agents know, a rejected call in the log, and no engine request."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        rig.engine.what = identity(max_context_tokens=9)
        answer = await rig.chat(opened)

        (call,) = calls(rig.publisher)
        assert (400, "context_length_exceeded") == (answer.status_code, answer.json()["error"]["code"])
        assert (Outcome.REJECTED, []) == (call.outcome, rig.engine.requests)


async def test_limit_is_cut_to_what_the_context_leaves(tmp_path: Path) -> None:
    """The effective limit is recorded, whatever was asked for."""
    async with started_gateway(tmp_path) as rig:
        await rig.chat(await rig.open(), max_tokens=1000)

        assert 64 - 9 == calls(rig.publisher)[0].sampling.max_tokens


async def test_prompts_of_a_conversation_are_written_as_what_they_add(tmp_path: Path) -> None:
    """Each turn names its base, and the whole prompts come back from the records alone."""
    async with started_gateway(tmp_path, Play([[28], [2]])) as rig:
        opened = await rig.open()
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            await rig.chat(opened, messages=messages)
            messages = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "hi"}]

        found = calls(rig.publisher)
        prompts, failed = decode_prompts(found)
        assert {} == failed
        assert [None, found[0].call_id, found[1].call_id] == [call.prompt.base_call_id for call in found]
        assert [request[0] for request in rig.engine.requests] == [prompts[call.call_id].tolist() for call in found]


@pytest.mark.parametrize(("rollout", "key"), [("r-1", ""), ("r-1", "sk-x"), ("r-2", None), ("r-1/../r-2", None)])
async def test_wrong_key_is_a_401_in_openai_shape(tmp_path: Path, rollout: str, key: str | None) -> None:
    """No key, a foreign one, or another rollout's: the same answer that OpenAI gives, and nothing is recorded."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        answer = await rig.http.post(
            f"/r/{rollout}/a/0/v1/chat/completions",
            content=BODY,
            headers={"authorization": f"Bearer {opened['api_key'] if key is None else key}"},
        )

        assert (401, "invalid_api_key") == (answer.status_code, answer.json()["error"]["code"])
        assert 1 == len(rig.publisher.records)


async def test_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    """Some clients send it so."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        answer = await rig.http.post(
            opened["base_url"] + "/chat/completions", content=BODY, headers={"x-api-key": opened["api_key"]}
        )

        assert 200 == answer.status_code


async def test_body_that_is_no_json_is_a_400(tmp_path: Path) -> None:
    """And nothing is recorded."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        answer = await rig.http.post(
            opened["base_url"] + "/chat/completions", content=b"{", headers={"x-api-key": opened["api_key"]}
        )

        assert (400, "invalid_json", 1) == (
            answer.status_code, answer.json()["error"]["code"], len(rig.publisher.records),
        )  # fmt: skip


async def test_counters_tell_what_happened(tmp_path: Path) -> None:
    """Stats for people, metrics for Prometheus."""
    async with started_gateway(tmp_path, Play(fails_after=1), Play()) as rig:
        opened = await rig.open()
        await rig.chat(opened)
        await rig.chat(opened)
        stats, metrics = (await rig.admin.get("/stats")).json(), (await rig.admin.get("/metrics")).text

        assert (2, {"upstream_error": 1, "completed": 1}, 0) == (
            stats["calls_started"], stats["calls_finished"], stats["calls_in_flight"],
        )  # fmt: skip
        assert 'rollstream_gateway_calls_total{outcome="completed"} 1.0' in metrics
        assert 'rollstream_gateway_refused_total{status="502"} 1.0' in metrics
