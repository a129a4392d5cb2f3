"""Rollouts of a function that samples by itself: the same records as through the gateway, without one.

A white-box loop renders its own prompts and has the ids, log-probabilities and weight labels of its engine in hand. It says what
it samples from before it samples, fills an `Answer`, and goes on once Kafka has the outcome. The hard checks, prompt deltas and
reason codes are the gateway's; so is the order of the records, and the end that completes the rollout.

    async def play(publisher, engine):
        rollout = await DirectRollout.open(publisher, engine.identity, task_id="add-17-25")
        prompt_ids = engine.render("17 + 25 = ?")
        async with rollout.call(prompt_ids, SamplingParams(1.0, 1.0, -1, max_tokens=64)) as call:
            sampled = engine.sample(prompt_ids)
            call.answer.ids += sampled.ids
            call.answer.logprobs += sampled.logprobs
            call.answer.finish = Finish("stop", (LabelSpan(0, len(sampled.ids), sampled.weights),))
            call.message = {"role": "assistant", "content": sampled.text}
        await rollout.event(EventKind.TOOL_RESULT, {"correct": sampled.text == "42"}, call_id=call.call_id)
        await rollout.finish(RolloutStatus.SUCCEEDED, {"reward": 1.0})

An exception in the block is the call's error: what was sampled before it is kept, and the call is not trainable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rollstream.producers.base import Publisher, acknowledged
from rollstream.producers.call import outcome_of
from rollstream.producers.draft import CallDraft, CallHead
from rollstream.producers.engines.base import Answer, Identity, Ids
from rollstream.producers.ids import new_id
from rollstream.producers.recorder import CallRecorder
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.producers.spool import Spool
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import (
    Delivery,
    EnvironmentEvent,
    EventKind,
    ModelCall,
    Outcome,
    RolloutOpened,
    RolloutStatus,
    SamplingParams,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json

PROTOCOL = "direct"
"""Name in records, where a client protocol stands otherwise."""
_VERSION = "1"
"""Counts up when the same answer would be recorded otherwise."""


@dataclass(slots=True)
class DirectCall:
    """A call while the function samples."""

    call_id: str
    """The call."""
    answer: Answer = field(default_factory=Answer)
    """What was sampled; to be filled, with its `finish` at the end."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """The assistant message, for people who look at the rollout."""
    record: ModelCall | None = None
    """The outcome, once Kafka has it."""


class DirectRollout:
    """One rollout attempt; made by `open`. Its calls may run at once."""

    def __init__(
        self,
        publisher: Publisher,
        identity: Identity,
        opening: RolloutOpened,
        *,
        version: Callable[[], int | None],
        spool: Spool | None,
        ack_timeout_s: float,
        now_ms: Callable[[], int],
    ) -> None:
        """See `open`."""
        self.opening = opening
        """The record that it began with."""
        self._publisher = publisher
        self._identity = identity
        self._version = version
        self._ack_timeout_s = ack_timeout_s
        self._now_ms = now_ms
        self._recorder = CallRecorder(publisher, spool, ack_timeout_s=ack_timeout_s, now_ms=now_ms)
        self._memories = MemoryOfRollouts()
        self._memory = self._memories.of(opening.rollout_id, opening.attempt)

    @classmethod
    async def open(
        cls,
        publisher: Publisher,
        identity: Identity,
        *,
        task_id: str,
        task: Mapping[str, Any] | None = None,
        rollout_id: str | None = None,
        attempt: int = 0,
        group_id: str | None = None,
        group_size: int = 1,
        policy: str = "default",
        version: Callable[[], int | None] = lambda: None,
        spool: Spool | None = None,
        ack_timeout_s: float = 10.0,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> DirectRollout:
        """Open a rollout attempt.

        Args:
            identity: what samples: engine, encoding, context, and which distribution its log-probabilities belong to.
            rollout_id: None makes one. group_id: None puts the rollout into a group of its own.
            version: the policy version that is served now, if that is known beside the answers; for reports.
            spool: keeps on disk what Kafka does not acknowledge in time; replay it at the next start.

        Raises: BrokerError: not acknowledged.
        """
        opened_at_ms = now_ms()
        rollout_id = rollout_id or new_id("rollout", opened_at_ms)
        opening = RolloutOpened(
            rollout_id=rollout_id,
            attempt=attempt,
            group_id=group_id or rollout_id,
            group_size=group_size,
            task_id=task_id,
            opened_at_ms=opened_at_ms,
            task=_json(task or {}),
            policy=policy,
        )
        await publisher.publish(opening, timeout_s=ack_timeout_s)
        return cls(
            publisher,
            identity,
            opening,
            version=version,
            spool=spool,
            ack_timeout_s=ack_timeout_s,
            now_ms=now_ms,
        )

    @asynccontextmanager
    async def call(
        self,
        prompt_ids: Ids | Sequence[int],
        sampling: SamplingParams,
        *,
        state_key: str | None = None,
        action_key: str | None = None,
    ) -> AsyncIterator[DirectCall]:
        """Record one call: its intent on entering, its outcome on leaving, each acknowledged.

        Args: prompt_ids: the exact ids that are sampled from, shape [T]. sampling: how, as it takes effect.

        Raises: BrokerError: not acknowledged. On entering: sample nothing. On leaving: nobody may act on the answer; a
            correction follows it.
        """
        draft = self._draft(np.asarray(prompt_ids, dtype=np.uint32), sampling, state_key, action_key)
        call = DirectCall(draft.head.call_id)

        def end(outcome: Outcome, error: str | None) -> ModelCall:
            is_whole = error is None and outcome.is_whole
            return draft.outcome(
                call.answer,
                outcome,
                Delivery.FULL if is_whole else Delivery.NONE,
                message=call.message,
                error=error,
                now_ms=self._now_ms(),
                version_after=self._version(),
            )

        await self._recorder.intend(draft.intent(), lambda error: end(Outcome.REJECTED, error))
        try:
            yield call
        except asyncio.CancelledError:
            await self._recorder.write(end(Outcome.CLIENT_DISCONNECTED, "the rollout function was cancelled"))
            raise
        except Exception as error:
            await self._recorder.write(end(Outcome.UPSTREAM_ERROR, f"{type(error).__name__}: {error}"))
            raise
        record = end(outcome_of(call.answer), None)
        await self._recorder.write(record)
        call.record = record
        if record.delivered is Delivery.FULL:
            output_ids = np.frombuffer(record.output_ids, dtype="<u4")
            self._memories.add_base(self._memory, call.call_id, draft.prompt_ids, output_ids, draft.delta)

    async def event(
        self,
        kind: EventKind,
        content: Any,
        *,
        event_id: str | None = None,
        call_id: str | None = None,
        reward: float | None = None,
        is_executable: bool | None = None,
        state_key: str | None = None,
    ) -> str:
        """Write an environment event. Args: as the fields of `EnvironmentEvent`. Returns: its id.

        Raises: BrokerError: not acknowledged; send it again with the same `event_id`, and it counts once.
        """
        now_ms = self._now_ms()
        record = EnvironmentEvent(
            event_id=event_id or new_id("event", now_ms),
            rollout_id=self.opening.rollout_id,
            attempt=self.opening.attempt,
            group_id=self.opening.group_id,
            kind=kind,
            content=_json(content),
            at_ms=now_ms,
            call_id=call_id,
            reward=reward,
            is_executable=is_executable,
            state_key=state_key,
        )
        await self._publisher.publish(record, timeout_s=self._ack_timeout_s)
        return record.event_id

    async def finish(self, status: RolloutStatus, outcome: Mapping[str, Any] | None = None) -> None:
        """Write the end of the attempt, when all its calls have ended. Repeated, it is written as it was first.

        Raises: BrokerError: not acknowledged; do it again.
        """
        opening = self.opening
        terminal = self._memory.terminal = self._memory.terminal or Terminal(
            rollout_id=opening.rollout_id,
            attempt=opening.attempt,
            group_id=opening.group_id,
            group_size=opening.group_size,
            task_id=opening.task_id,
            status=status,
            finished_at_ms=self._now_ms(),
            outcome=_json(outcome or {}),
        )
        for future in [self._publisher.submit(terminal, noun=noun) for noun in TERMINAL_TOPICS]:
            await acknowledged(future, self._ack_timeout_s)

    def _draft(
        self, prompt_ids: Ids, sampling: SamplingParams, state_key: str | None, action_key: str | None
    ) -> CallDraft:
        opening, now_ms = self.opening, self._now_ms()
        head = CallHead(
            call_id=new_id("call", now_ms),
            call_attempt=0,
            call_index=self._memory.next_index(now_ms - opening.opened_at_ms),
            rollout_id=opening.rollout_id,
            attempt=opening.attempt,
            group_id=opening.group_id,
            policy=opening.policy,
            protocol=PROTOCOL,
            adapter_version=_VERSION,
            request_digest=digest_json(PROTOCOL, prompt_ids.tolist(), sampling.as_json()),
            started_at_ms=now_ms,
            state_key=state_key,
            action_key=action_key,
        )
        delta = self._memory.delta(prompt_ids)
        return CallDraft(head, self._identity, prompt_ids, delta, sampling, self._version())


def _json(value: Any) -> Json:
    return Json(orjson.dumps(value).decode())
