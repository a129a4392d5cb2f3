"""How a model call is served, without HTTP. In this order, each step only after the one before:

1. render the messages to ids;
2. write the intent (`CallStarted`), acknowledged by Kafka;
3. sample;
4. check, write the outcome (`ModelCall`), acknowledged by Kafka;
5. only then does the client see the end.

When Kafka does not acknowledge the outcome in time, it stays queued and goes to the spool, a `CallDelivery` (none, `ack_timeout`)
follows it in the same partition, and the client gets a retryable error. A failed or cancelled call has an outcome, too, with the
ids that came. There is no hidden retry: each engine request is an attempt with its own record.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rollstream.errors import BrokerError, ProviderError, boundary
from rollstream.producers.base import Publisher, acknowledged
from rollstream.producers.call import outcome_of
from rollstream.producers.capability import Claims
from rollstream.producers.dialects.base import Dialect, Request, RequestRefused
from rollstream.producers.engines.base import Answer, Conversation, Engine, Ids
from rollstream.producers.gateway.draft import Draft, Link, Served, Ticket, correction
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.refusals import (
    broker_refusal,
    context_overflow,
    engine_refusal,
    unfinished_refusal,
)
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.producers.spool import Spool
from rollstream.schemas.records import Delivery, ModelCall, Outcome, Record
from rollstream.schemas.types import unpack_ids
from rollstream.settings import GatewaySettings

_log = logging.getLogger(__name__)


class CallService:
    """Serves model calls; one for a gateway process."""

    def __init__(
        self,
        gateway: GatewaySettings,
        engine: Engine,
        publisher: Publisher,
        *,
        memory: MemoryOfRollouts,
        spool: Spool,
        metrics: GatewayMetrics,
        now_ms: Callable[[], int],
    ) -> None:
        self._settings = gateway
        self._engine = engine
        self._publisher = publisher
        self._memory = memory
        self._spool = spool
        self._metrics = metrics
        self._now_ms = now_ms

    def arrive(self, claims: Claims, dialect: Dialect, request: Request, link: Link) -> Ticket:
        """Give a call its identity: that of an earlier one which did not reach the client, or a new one."""
        memory = self._memory.of(claims.rollout_id, claims.attempt)
        now_ms = self._now_ms()
        call_id, call_attempt = memory.retry_of(request.digest) or (new_id("call", now_ms), 0)
        return Ticket(
            claims=claims,
            dialect=dialect,
            request=request,
            link=link,
            memory=memory,
            call_id=call_id,
            call_attempt=call_attempt,
            call_index=memory.next_index(now_ms - claims.opened_at_ms),
            arrived_at_ms=now_ms,
        )

    async def run(self, ticket: Ticket) -> Served:
        """Serve one call up to the acknowledgement of its outcome.

        Raises: RequestRefused: the client gets an error; whatever had begun is recorded.
        """
        self._metrics.in_flight += 1
        try:
            return await self._serve(await self._draft(ticket))
        except ProviderError as error:
            raise engine_refusal(error) from error
        except BrokerError as error:
            raise broker_refusal(error) from error
        finally:
            self._metrics.in_flight -= 1

    async def count(self, claims: Claims, conversation: Conversation) -> int:
        """How many tokens a prompt has. Nothing is recorded, for nothing is sampled.

        Raises: RequestRefused.
        """
        self._check_policy(claims)
        try:
            await self._engine.start()
            return len(await self._engine.render(conversation))
        except ProviderError as error:
            raise engine_refusal(error) from error

    def delivering(self, served: Served) -> None:
        """The end is about to be sent: the client may build on it from now on."""
        draft, call = served.draft, served.call
        self._memory.add_base(
            draft.ticket.memory, call.call_id, draft.prompt_ids, unpack_ids(call.output_ids), call.prompt
        )

    async def not_delivered(self, served: Served, delivered: Delivery) -> None:
        """The client left before the end was sent: write a correction."""
        call = served.call
        if call.delivered is Delivery.NONE:
            return
        served.draft.ticket.memory.remember_undelivered(call.request_digest, call.call_id, call.call_attempt)
        record = correction(call, delivered, "client_disconnected", self._now_ms())
        try:
            await self._publisher.publish(record, timeout_s=self._settings.ack_timeout_s)
        except BrokerError:
            _log.warning("the correction of call %s is queued only", call.call_id, exc_info=True)

    def _check_policy(self, claims: Claims) -> None:
        if claims.policy != self._settings.policy:
            raise RequestRefused(
                f"this rollout was opened for policy {claims.policy!r}, and this gateway serves {self._settings.policy!r}; send "
                "its calls to the gateway that opened it",
                code="other_policy",
            )

    async def _draft(self, ticket: Ticket) -> Draft:
        """Render the prompt. Nothing is written yet: where this fails, there was no call."""
        request = ticket.request
        is_drafted = False
        try:
            self._check_policy(ticket.claims)
            await self._engine.start()
            identity = self._engine.identity()
            prompt_ids = await self._prompt_ids(request)
            is_drafted = True
        finally:
            if not is_drafted and ticket.call_attempt:
                ticket.memory.put_back(request.digest, ticket.call_id, ticket.call_attempt)
        return Draft(
            ticket=ticket,
            identity=identity,
            prompt_ids=prompt_ids,
            delta=ticket.memory.delta(prompt_ids),
            sampling=request.wishes.effective(
                temperature=self._settings.temperature,
                max_tokens=self._settings.max_output_tokens,
                room_tokens=max(identity.max_context_tokens - len(prompt_ids), 1),
            ),
            version_before=self._engine.version,
        )

    async def _prompt_ids(self, request: Request) -> Ids:
        with boundary(ProviderError, "render this prompt", reason="engine_error"):
            if isinstance(request.prompt, Conversation):
                return await self._engine.render(request.prompt)
            if isinstance(request.prompt, str):
                return await self._engine.encode(request.prompt)
            return np.array(request.prompt, dtype=np.uint32)

    async def _message(self, draft: Draft, answer: Answer) -> dict[str, Any]:
        """The assistant message in OpenAI's shape."""
        prompt = draft.ticket.request.prompt
        with boundary(ProviderError, "read the sampled tokens", reason="engine_error"):
            if isinstance(prompt, Conversation):
                call_id = draft.ticket.call_id
                return await self._engine.parse(prompt, answer.ids, draft.prompt_ids, answer.text, call_id)
            return {"role": "assistant", "content": answer.text or await self._engine.decode(answer.ids)}

    async def _serve(self, draft: Draft) -> Served:
        answer = Answer()
        outcome, failure = await self._sample(draft, answer)
        message: dict[str, Any] = {}
        memory = draft.ticket.memory
        if failure is None and not draft.ticket.link.is_gone:
            try:
                message = await self._message(draft, answer)
            except ProviderError as error:
                failure = engine_refusal(error)
        call = self._outcome(draft, answer, outcome, message, str(failure) if failure else None)
        is_lost = call.delivered is Delivery.NONE and outcome is not Outcome.REJECTED
        try:
            await self._write(call)
        except BrokerError:
            is_lost = True
            raise
        finally:
            if is_lost:
                memory.remember_undelivered(call.request_digest, call.call_id, call.call_attempt)
        if failure is not None:
            raise failure
        return Served(draft, call, message)

    async def _sample(self, draft: Draft, answer: Answer) -> tuple[Outcome, RequestRefused | None]:
        """Intent, then engine. Returns: how it ended, and the error that the client gets, if any."""
        ticket, limit = draft.ticket, draft.identity.max_context_tokens
        if len(draft.prompt_ids) >= limit:
            return Outcome.REJECTED, context_overflow(len(draft.prompt_ids), limit)
        try:
            await self._intend(draft)
            began = time.perf_counter()
            with boundary(ProviderError, "sample", reason="engine_error"):
                await self._engine.generate(
                    draft.prompt_ids, draft.sampling, f"{ticket.call_id}-{ticket.call_attempt}", answer
                )
            self._metrics.engine_seconds.observe(time.perf_counter() - began)
        except ProviderError as error:
            is_refused = error.reason in ("bad_request", "context_length") and not answer.ids
            return (Outcome.REJECTED if is_refused else Outcome.UPSTREAM_ERROR), engine_refusal(error)
        except asyncio.CancelledError:
            if not ticket.link.is_gone:
                raise
            return Outcome.CLIENT_DISCONNECTED, None
        finally:
            ticket.link.is_cancellable = False
        outcome = outcome_of(answer)
        return outcome, None if outcome.is_whole else unfinished_refusal(outcome)

    def _outcome(
        self, draft: Draft, answer: Answer, outcome: Outcome, message: dict[str, Any], error: str | None
    ) -> ModelCall:
        return draft.outcome(
            answer, outcome, message, error, now_ms=self._now_ms(), version_after=self._engine.version
        )

    async def _intend(self, draft: Draft) -> None:
        """Write the intent.

        Raises: BrokerError: it was not acknowledged. Behind it the outcome `rejected` is queued, so that an intent that arrives
            late does not stand alone; neither is spooled, for nothing was sampled.
        """
        intent = self._publisher.submit(draft.intent())
        self._metrics.started += 1
        try:
            await acknowledged(intent, self._settings.ack_timeout_s)
        except BrokerError as error:
            call = self._outcome(draft, Answer(), Outcome.REJECTED, {}, str(error))
            self._metrics.call_finished(call)
            draft.ticket.memory.remember_undelivered(call.request_digest, call.call_id, call.call_attempt)
            self._publisher.submit(call)
            raise

    async def _write(self, call: ModelCall) -> None:
        """Write an outcome.

        Raises: BrokerError: Kafka did not acknowledge it in time; it and its correction are queued and in the spool.
        """
        self._metrics.call_finished(call)
        began = time.perf_counter()
        future = None
        try:
            future = self._publisher.submit(call)
            await acknowledged(future, self._settings.ack_timeout_s)
        except BrokerError:
            record = correction(call, Delivery.NONE, "ack_timeout", self._now_ms())
            # Before the disk, which may refuse: where the call arrives late, this must follow it.
            corrected = self._submit_if_possible(record)
            await self._spool_behind(call, future)
            await self._spool_behind(record, corrected)
            raise
        self._metrics.ack_seconds.observe(time.perf_counter() - began)

    def _submit_if_possible(self, record: Record) -> asyncio.Future[None] | None:
        try:
            return self._publisher.submit(record)
        except BrokerError:
            return None

    async def _spool_behind(self, record: Record, future: asyncio.Future[None] | None) -> None:
        """Put a queued record on disk until its acknowledgement comes; without a future, until the next start."""
        file = await asyncio.to_thread(self._spool.keep, record)
        self._metrics.spooled.inc()
        _log.warning("Kafka does not acknowledge; %s is kept in %s", type(record).__name__, file)
        if future is not None:
            self._spool.remove_when_done(file, future)


def new_id(kind: str, now_ms: int) -> str:
    """An identifier that nobody else makes; those made later sort behind."""
    return f"{kind}-{now_ms:012x}{os.urandom(8).hex()}"
