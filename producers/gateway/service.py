"""How a model call is served, without HTTP. In this order, each step only after the one before:

1. render the messages to ids;
2. write the intent (`CallStarted`), acknowledged by Kafka;
3. sample;
4. check, write the outcome (`ModelCall`), acknowledged by Kafka;
5. only then does the client see the end.

When Kafka does not acknowledge the outcome in time, `recorder.py` keeps it, and the client gets a retryable error. A failed or
cancelled call has an outcome, too, with the ids that came. There is no hidden retry: each engine request is an attempt with its
own record, and which requests are attempts of one call is said in `rollout_memory.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rollstream.errors import BrokerError, ProviderError, boundary
from rollstream.producers.base import Publisher
from rollstream.producers.call import outcome_of
from rollstream.producers.capability import Claims
from rollstream.producers.dialects.base import Dialect, Request, RequestRefused
from rollstream.producers.draft import CallDraft, correction
from rollstream.producers.engines.base import Answer, Conversation, Engine, Ids
from rollstream.producers.gateway.engine_watch import EngineWatch
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.refusals import (
    broker_refusal,
    context_overflow,
    engine_refusal,
    replaced_refusal,
    unfinished_refusal,
)
from rollstream.producers.gateway.ticket import Link, Served, Ticket
from rollstream.producers.ids import new_id
from rollstream.producers.recorder import CallRecorder
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.producers.spool import Spool
from rollstream.schemas.records import Delivery, ModelCall, Outcome
from rollstream.schemas.types import unpack_ids
from rollstream.settings import GatewaySettings


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
        self._memory = memory
        self._metrics = metrics
        self._now_ms = now_ms
        self._watch = EngineWatch(gateway.policy, metrics)
        self._recorder = CallRecorder(
            publisher, spool, ack_timeout_s=gateway.ack_timeout_s, now_ms=now_ms, on_spooled=metrics.spooled.inc
        )

    def arrive(self, claims: Claims, dialect: Dialect, request: Request, link: Link) -> Ticket:
        """Give a call its identity: that of an earlier one which did not reach the client, or a new one."""
        memory = self._memory.of(claims.rollout_id, claims.attempt)
        now_ms = self._now_ms()
        return Ticket(
            claims=claims,
            dialect=dialect,
            request=request,
            link=link,
            memory=memory,
            open_call=memory.arrive(request.digest, new_id("call", now_ms), link, is_retry=link.is_retry),
            call_index=memory.next_index(now_ms - claims.opened_at_ms),
            arrived_at_ms=now_ms,
        )

    async def run(self, ticket: Ticket) -> Served:
        """Serve one call up to the acknowledgement of its outcome.

        Raises: RequestRefused: the client gets an error; whatever had begun is recorded.
        """
        self._metrics.in_flight += 1
        open_call, is_served = ticket.open_call, False
        open_call.task = asyncio.current_task()
        try:
            served = await self._serve(ticket, await self._draft(ticket))
            is_served = True
            return served
        except ProviderError as error:
            raise engine_refusal(error) from error
        except BrokerError as error:
            raise broker_refusal(error) from error
        except asyncio.CancelledError:
            if not open_call.is_replaced:
                raise
            raise replaced_refusal() from None
        finally:
            self._metrics.in_flight -= 1
            open_call.task = None
            if not is_served:
                ticket.memory.lose(open_call)

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
        ticket, call = served.ticket, served.call
        if not ticket.open_call.is_replaced:  # else its id is a further attempt's, and so will be the base
            prompt_ids, output_ids = served.prompt_ids, unpack_ids(call.output_ids)
            self._memory.add_base(ticket.memory, call.call_id, prompt_ids, output_ids, call.prompt)
        ticket.memory.settle(ticket.open_call)

    async def not_delivered(self, served: Served, delivered: Delivery) -> None:
        """The client left before it had all of it: write a correction."""
        ticket, call = served.ticket, served.call
        ticket.memory.lose(ticket.open_call)
        if call.delivered is not Delivery.NONE:
            reason = "retried" if ticket.open_call.is_replaced else "client_disconnected"
            await self._recorder.correct(correction(call, delivered, reason, self._now_ms()))

    def _check_policy(self, claims: Claims) -> None:
        if claims.policy != self._settings.policy:
            raise RequestRefused(
                f"this rollout was opened for policy {claims.policy!r}, and this gateway serves {self._settings.policy!r}; send "
                "its calls to the gateway that opened it",
                code="other_policy",
            )

    async def _draft(self, ticket: Ticket) -> CallDraft:
        """Render the prompt. Nothing is written yet: where this fails, there was no call."""
        request = ticket.request
        self._check_policy(ticket.claims)
        await self._engine.start()
        identity = self._engine.identity()
        self._watch.see(identity)
        prompt_ids = await self._prompt_ids(request)
        return CallDraft(
            head=ticket.head(),
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

    async def _message(self, ticket: Ticket, draft: CallDraft, answer: Answer) -> dict[str, Any]:
        """The assistant message in OpenAI's shape."""
        prompt = ticket.request.prompt
        with boundary(ProviderError, "read the sampled tokens", reason="engine_error"):
            if isinstance(prompt, Conversation):
                return await self._engine.parse(prompt, answer.ids, draft.prompt_ids, answer.text, ticket.call_id)
            return {"role": "assistant", "content": answer.text or await self._engine.decode(answer.ids)}

    async def _serve(self, ticket: Ticket, draft: CallDraft) -> Served:
        answer = Answer()
        outcome, failure = await self._sample(ticket, draft, answer)
        message: dict[str, Any] = {}
        if failure is None and not ticket.link.is_gone:
            try:
                message = await self._message(ticket, draft, answer)
            except ProviderError as error:
                failure = engine_refusal(error)
        is_shown = failure is None and outcome.is_whole and not ticket.link.is_gone
        delivered = Delivery.UNKNOWN if is_shown else Delivery.NONE
        call = self._outcome(draft, answer, outcome, delivered, message, str(failure) if failure else None)
        began = time.perf_counter()
        await self._recorder.write(call)
        self._metrics.ack_seconds.observe(time.perf_counter() - began)
        if outcome is Outcome.REJECTED:
            ticket.memory.settle(ticket.open_call)
        if failure is not None:
            raise failure
        served = Served(ticket, call, message, draft.prompt_ids)
        if ticket.open_call.is_replaced:
            await self.not_delivered(served, Delivery.NONE)
            raise replaced_refusal()
        return served

    async def _sample(
        self, ticket: Ticket, draft: CallDraft, answer: Answer
    ) -> tuple[Outcome, RequestRefused | None]:
        """Intent, then engine. Returns: how it ended, and the error that the client gets, if any."""
        limit = draft.identity.max_context_tokens
        if len(draft.prompt_ids) >= limit:
            return Outcome.REJECTED, context_overflow(len(draft.prompt_ids), limit)
        try:
            await self._intend(ticket, draft)
            began = time.perf_counter()
            with boundary(ProviderError, "sample", reason="engine_error"):
                request_id = f"{ticket.call_id}-{ticket.open_call.call_attempt}"
                await self._engine.generate(draft.prompt_ids, draft.sampling, request_id, answer)
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

    async def _intend(self, ticket: Ticket, draft: CallDraft) -> None:
        """Write the intent. Raises: BrokerError: as `CallRecorder.intend`."""

        def rejected(error: str) -> ModelCall:
            return self._outcome(draft, Answer(), Outcome.REJECTED, Delivery.NONE, {}, error)

        ticket.open_call.is_written = True
        self._metrics.started += 1
        await self._recorder.intend(draft.intent(), rejected)

    def _outcome(
        self,
        draft: CallDraft,
        answer: Answer,
        outcome: Outcome,
        delivered: Delivery,
        message: dict[str, Any],
        error: str | None,
    ) -> ModelCall:
        call = draft.outcome(
            answer,
            outcome,
            delivered,
            message=message,
            error=error,
            now_ms=self._now_ms(),
            version_after=self._engine.version,
        )
        self._metrics.call_finished(call)
        return call
