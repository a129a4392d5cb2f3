"""A call being served: what is known of it from the start, and the two records that are made from that. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollstream.producers.call import judge
from rollstream.producers.capability import Claims
from rollstream.producers.dialects.base import Dialect, End, Request, Shown, ToolCall
from rollstream.producers.engines.base import Answer, Conversation, Identity, Ids
from rollstream.producers.rollout_memory import RolloutMemory
from rollstream.schemas.identity import canonical_json, digest_bytes, digest_json
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    Delivery,
    Encoding,
    ModelCall,
    Outcome,
    PromptDelta,
    SamplingParams,
)
from rollstream.schemas.types import Json, PackedIds, pack_floats, pack_ids

_ENDS = {Outcome.COMPLETED: End.STOP, Outcome.STOP_STRING: End.STOP_STRING, Outcome.LENGTH: End.LENGTH}


@dataclass(slots=True)
class Link:
    """The connection that a call is served on."""

    harness: str = ""
    """The client's user agent."""
    state_key: str | None = None
    """Environment state before the action, if the client says."""
    action_key: str | None = None
    """Canonical action, if the client says."""
    is_gone: bool = False
    """The client has left."""
    is_answered: bool = False
    """What the client gets, or that it gets nothing, is settled."""
    is_cancellable: bool = True
    """The engine still works for it; afterwards the outcome is written whatever the client does."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call as it arrived: it has an identity, and nothing was done for it."""

    claims: Claims
    """Whose call it is."""
    dialect: Dialect
    """The protocol that it came in."""
    request: Request
    """What it asks for."""
    link: Link
    """Its connection."""
    memory: RolloutMemory
    """What is remembered of its rollout."""
    call_id: str
    """The call; the same again for a retry of what did not arrive."""
    call_attempt: int
    """Its attempt, from 0."""
    call_index: int
    """Its place among the calls of the rollout."""
    arrived_at_ms: int
    """UTC epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A call that has a prompt and not yet an outcome."""

    ticket: Ticket
    """The call as it arrived."""
    identity: Identity
    """The engine as it was when the call began."""
    prompt_ids: Ids
    """The prompt, shape [T]."""
    delta: PromptDelta
    """The prompt as it is written: the same in the intent and in the outcome, whatever became a base between."""
    sampling: SamplingParams
    """How it is sampled."""
    version_before: int | None
    """The version that the gateway took the engine to serve."""

    def intent(self) -> CallStarted:
        """The record to write before the engine is asked."""
        ticket, delta = self.ticket, self.delta
        return CallStarted(
            call_id=ticket.call_id,
            rollout_id=ticket.claims.rollout_id,
            attempt=ticket.claims.attempt,
            group_id=ticket.claims.group_id,
            call_index=ticket.call_index,
            prompt_length_tokens=delta.length,
            prompt_digest=delta.digest,
            request_digest=ticket.request.digest,
            started_at_ms=ticket.arrived_at_ms,
            call_attempt=ticket.call_attempt,
            protocol=ticket.dialect.protocol,
            prompt_suffix=delta.suffix,
            prompt_base_call_id=delta.base_call_id,
            prompt_base_len=delta.base_len,
            sampling=self.sampling.as_json(),
        )

    def outcome(
        self,
        answer: Answer,
        outcome: Outcome,
        message: dict[str, Any],
        error: str | None,
        *,
        now_ms: int,
        version_after: int | None,
    ) -> ModelCall:
        """The record to write before the client sees the end."""
        ticket, identity = self.ticket, self.identity
        verdict = judge(
            answer, outcome=outcome, prompt_ids=self.prompt_ids, sampling=self.sampling, identity=identity
        )
        is_shown = error is None and outcome.is_whole and not ticket.link.is_gone
        return ModelCall(
            call_id=ticket.call_id,
            rollout_id=ticket.claims.rollout_id,
            attempt=ticket.claims.attempt,
            group_id=ticket.claims.group_id,
            call_index=ticket.call_index,
            protocol=ticket.dialect.protocol,
            adapter_version=ticket.dialect.version,
            model_requested=ticket.request.model,
            model_served=identity.model,
            engine=identity.engine,
            engine_version=identity.engine_version,
            encoding=self._encoding(),
            sampling=self.sampling,
            logprob_semantics=identity.semantics,
            prompt=self.delta,
            output_ids=_packed(answer.ids),
            output_logprobs=pack_floats(verdict.logprobs),
            version_spans=verdict.spans,
            policy=ticket.claims.policy,
            finish_reason=answer.finish.reason if answer.finish else "",
            outcome=outcome,
            delivered=Delivery.UNKNOWN if is_shown else Delivery.NONE,
            trainable=not verdict.defects,
            defects=verdict.defects,
            request_digest=ticket.request.digest,
            started_at_ms=ticket.arrived_at_ms,
            finished_at_ms=now_ms,
            first_token_at_ms=answer.first_token_at_ms,
            call_attempt=ticket.call_attempt,
            message=Json(orjson.dumps(message).decode()),
            error=error,
            harness=ticket.link.harness,
            state_key=ticket.link.state_key,
            action_key=ticket.link.action_key,
            sampling_requested=Json(canonical_json(dict(ticket.request.wishes.overruled)).decode()),
            stop_reason=(answer.finish.stop_string if answer.finish else None) or "",
            engine_fingerprint=identity.fingerprint,
            tools_digest=self._tools_digest(),
            adapter=identity.adapter,
            adapter_digest=identity.adapter_digest,
            version_before=self.version_before,
            version_after=version_after,
            pause_mode=answer.pause_mode,
            cache_cleared=answer.cache_cleared,
        )

    def _encoding(self) -> Encoding:
        prompt, encoding = self.ticket.request.prompt, self.identity.encoding
        kwargs = prompt.template_kwargs if isinstance(prompt, Conversation) else {}
        return replace(encoding, template_kwargs_digest=digest_json(kwargs)) if kwargs else encoding

    def _tools_digest(self) -> str:
        prompt = self.ticket.request.prompt
        tools = prompt.tools if isinstance(prompt, Conversation) else None
        return digest_bytes(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)) if tools else ""


@dataclass(frozen=True, slots=True)
class Served:
    """A call whose outcome is in Kafka; what is left is to send it."""

    draft: Draft
    """The call as it began."""
    call: ModelCall
    """The outcome."""
    message: dict[str, Any]
    """The assistant message in OpenAI's shape, as the engine's parsers made it."""

    def shown(self) -> Shown:
        """What the client sees, for its protocol to write."""
        call, message = self.call, self.message
        content = message.get("content") or ""
        if call.outcome is Outcome.STOP_STRING and call.stop_reason:  # its ids are kept, its text is not shown
            content = content.partition(call.stop_reason)[0]
        return Shown(
            call_id=call.call_id,
            created_s=call.started_at_ms // 1000,
            model=call.model_served,
            content=content,
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(
                ToolCall(one["id"], one["function"]["name"], one["function"]["arguments"])
                for one in message.get("tool_calls") or ()
            ),
            end=_ENDS[call.outcome],
            stop_string=call.stop_reason or None,
            prompt_tokens=call.prompt.length,
            output_tokens=len(call.output_ids) // 4,
        )


def correction(call: ModelCall, delivered: Delivery, reason: str, now_ms: int) -> CallDelivery:
    """The record that says that the client did not get the answer whole."""
    return CallDelivery(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        group_id=call.group_id,
        delivered=delivered,
        reason=reason,
        at_ms=now_ms,
        call_attempt=call.call_attempt,
    )


def _packed(ids: list[int]) -> PackedIds:
    """Ids that an engine reported; what is no token id at all is left out, and `vocabulary` says so."""
    return pack_ids([token for token in ids if 0 <= token <= 0xFFFFFFFF])
