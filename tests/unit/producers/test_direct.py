"""Rollouts without a gateway: the same records, from a function that samples by itself."""

from __future__ import annotations

import asyncio
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import BrokerError
from rollstream.producers import direct
from rollstream.producers.direct import DirectCall, DirectRollout
from rollstream.producers.engines.base import Finish, Identity, LabelSpan
from rollstream.producers.memory import MemoryPublisher
from rollstream.producers.spool import Spool
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    Delivery,
    EnvironmentEvent,
    EventKind,
    LogprobSemantics,
    ModelCall,
    Outcome,
    RolloutOpened,
    RolloutStatus,
    SamplingParams,
    Terminal,
)
from rollstream.schemas.types import unpack_floats, unpack_ids
from tests.unit.producers.fakes import PROMPT, identity
from tests.unit.producers.toy_cases.toy import calls, joined, prompts

SAMPLING = SamplingParams(1.0, 1.0, -1, max_tokens=16)


@dataclass
class Sampled:
    """What the example's engine answers."""

    ids: list[int]
    logprobs: list[float]
    weights: str
    text: str


class ExampleEngine:
    """The engine of the example."""

    identity = identity()

    def render(self, _: str) -> list[int]:
        return list(PROMPT)

    def sample(self, _: list[int]) -> Sampled:
        return Sampled([28, 2], [-0.5, -0.25], "7", "42")


async def opened(publisher: MemoryPublisher, engine: Identity | None = None, **more: Any) -> DirectRollout:
    return await DirectRollout.open(publisher, engine or identity(), task_id="t", ack_timeout_s=0.05, **more)


async def sampled(rollout: DirectRollout, prompt: list[int], ids: list[int], **more: Any) -> ModelCall:
    """One call that goes well."""
    async with rollout.call(prompt, SAMPLING, **more) as call:
        call.answer.ids += ids
        call.answer.logprobs += [-0.5] * len(ids)
        call.answer.finish = Finish("stop", (LabelSpan(0, len(ids), "7"),))
    assert call.record is not None
    return call.record


async def test_example_of_the_docstring_writes_a_whole_rollout() -> None:
    """It runs as it stands, and its records are those of a gateway."""
    assert direct.__doc__ is not None
    (example,) = re.findall(r"\n\n((?:    .*\n)+)", direct.__doc__)
    names: dict[str, Any] = {
        "DirectRollout": DirectRollout,
        "SamplingParams": SamplingParams,
        "Finish": Finish,
        "LabelSpan": LabelSpan,
        "EventKind": EventKind,
        "RolloutStatus": RolloutStatus,
    }
    exec(textwrap.dedent(example), names)
    publisher = MemoryPublisher()
    await names["play"](publisher, ExampleEngine())

    kinds = [type(record) for record in publisher.records]
    assert [RolloutOpened, CallStarted, ModelCall, EnvironmentEvent, Terminal, Terminal, Terminal] == kinds
    (call,) = calls(publisher)
    assert ([28, 2], [-0.5, -0.25], True, "direct") == (
        unpack_ids(call.output_ids).tolist(),
        unpack_floats(call.output_logprobs).tolist(),
        call.trainable,
        call.protocol,
    )
    rollout = joined(publisher.written)
    assert ((call.call_id,), (), RolloutStatus.SUCCEEDED) == (
        tuple(one.call_id for one in rollout.calls), rollout.lost_call_ids, rollout.status,
    )  # fmt: skip


async def test_prompts_are_written_as_what_they_add() -> None:
    """As through the gateway, and they come back from the records alone."""
    publisher = MemoryPublisher()
    rollout = await opened(publisher)
    first = await sampled(rollout, list(PROMPT), [28, 2])
    second = await sampled(rollout, [*PROMPT, 28, 2, 3, 1], [11, 2], state_key="s", action_key="a")

    assert (first.call_id, 11) == (second.prompt.base_call_id, second.prompt.base_len)
    assert [list(PROMPT), [*PROMPT, 28, 2, 3, 1]] == prompts(publisher)
    assert (first.call_index < second.call_index, "s", "a") == (True, second.state_key, second.action_key)


async def test_intent_is_acknowledged_before_anything_is_sampled() -> None:
    """Where Kafka does not take it, the block is not entered, and a rejected call stands behind it."""
    publisher = MemoryPublisher()
    rollout = await opened(publisher)
    publisher.held = True
    with pytest.raises(BrokerError, match="acknowledge"):
        await sampled(rollout, list(PROMPT), [28, 2])
    publisher.release()

    assert [(Outcome.REJECTED, b"")] == [(call.outcome, call.output_ids) for call in calls(publisher)]


async def test_error_in_the_block_keeps_what_was_sampled() -> None:
    """It is the call's error, and it goes on to whoever called."""
    publisher = MemoryPublisher()
    rollout = await opened(publisher)

    async def play() -> None:
        async with rollout.call(PROMPT, SAMPLING) as call:
            call.answer.ids.append(10)
            call.answer.logprobs.append(-0.5)
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        await play()

    (record,) = calls(publisher)
    assert (Outcome.UPSTREAM_ERROR, [10], False, Delivery.NONE, "ZeroDivisionError: a bug") == (
        record.outcome,
        unpack_ids(record.output_ids).tolist(),
        record.trainable,
        record.delivered,
        record.error,
    )


async def test_function_that_is_cancelled_leaves_its_outcome() -> None:
    """As a client that leaves."""
    publisher = MemoryPublisher()
    rollout = await opened(publisher)
    has_begun = asyncio.Event()

    async def play() -> None:
        async with rollout.call(PROMPT, SAMPLING) as call:
            call.answer.ids.append(10)
            call.answer.logprobs.append(-0.5)
            has_begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(play())
    await has_begun.wait()
    task.cancel()
    await asyncio.wait([task])

    assert [(Outcome.CLIENT_DISCONNECTED, False)] == [(call.outcome, call.trainable) for call in calls(publisher)]


async def test_outcome_that_is_not_acknowledged_is_withdrawn_and_kept(tmp_path: Path) -> None:
    """The function gets an error, so nobody acts on the answer; a correction follows it, and both are on disk."""
    publisher, spool = MemoryPublisher(), Spool(tmp_path)
    rollout = await opened(publisher, spool=spool)
    call = DirectCall("")

    async def play() -> None:
        nonlocal call
        async with rollout.call(PROMPT, SAMPLING) as call:
            call.answer.finish = Finish("stop")
            publisher.held = True

    with pytest.raises(BrokerError, match="acknowledge"):
        await play()
    kept = [type(spool.read(file)[1]) for file in spool.files()]
    publisher.release()
    next_call = await sampled(rollout, [*PROMPT, 3], [2])

    assert [ModelCall, CallDelivery] == kept
    assert [ModelCall, CallDelivery, CallStarted, ModelCall] == [type(record) for record in publisher.records[2:]]
    assert (call.record, None) == (None, next_call.prompt.base_call_id)


@pytest.mark.parametrize(
    ("finish", "engine", "code"),
    [
        (Finish("stop"), {}, "version_interval"),
        (Finish("stop", (LabelSpan(0, 1, "7"),)), {}, "span_gap"),
        (Finish("stop", (LabelSpan(0, 2, "7"),)), {"semantics": LogprobSemantics.UNKNOWN}, "semantics_unknown"),
        (Finish("stop", (LabelSpan(0, 2, "7"),), output_tokens=3), {}, "token_count_mismatch"),
        (Finish("abort", (LabelSpan(0, 2, "7"),)), {}, "not_completed"),
        (None, {}, "version_interval"),
    ],
)
async def test_hard_checks_are_the_same(finish: Finish | None, engine: dict[str, Any], code: str) -> None:
    """Nobody's own loop is trusted more than a gateway's."""
    publisher = MemoryPublisher()
    rollout = await opened(publisher, identity(**engine))
    async with rollout.call(PROMPT, SAMPLING) as call:
        call.answer.ids += [28, 2]
        call.answer.logprobs += [-0.5, -0.5]
        call.answer.finish = finish

    (record,) = calls(publisher)
    assert (code, False) == (record.defects[0], record.trainable)


async def test_events_and_ends_may_be_sent_again() -> None:
    """With their identity they count once; a repeated end is the first one."""
    publisher = MemoryPublisher()
    rollout = await opened(publisher, rollout_id="r", group_id="g", group_size=2, task={"q": 1})
    for _ in range(2):
        assert "e" == await rollout.event(EventKind.TOOL_RESULT, "ok", event_id="e", reward=1)
    await rollout.finish(RolloutStatus.SUCCEEDED)
    await rollout.finish(RolloutStatus.FAILED)

    (end,) = {record for record in publisher.records if isinstance(record, Terminal)}
    joined_once = joined(publisher.written)
    assert (RolloutStatus.SUCCEEDED, "g", 2, 1) == (end.status, end.group_id, end.group_size, len(joined_once.events))
