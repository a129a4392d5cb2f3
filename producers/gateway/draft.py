"""A call being served: what is known of it from the start, and the two records that are made from that. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollstream.producers.call import judge
from rollstream.producers.capability import Claims
from rollstream.producers.dialects.chat import ADAPTER_VERSION, PROTOCOL, ChatRequest
from rollstream.producers.engines.base import Answer, Identity, Ids
from rollstream.producers.rollout_memory import RolloutMemory
from rollstream.schemas.identity import digest_ids, digest_json
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    Delivery,
    Encoding,
    ModelCall,
    Outcome,
    SamplingParams,
)
from rollstream.schemas.types import Json, PackedIds, pack_floats, pack_ids

_ENDED = (Outcome.COMPLETED, Outcome.LENGTH)


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
class Draft:
    """A call that has a prompt and not yet an outcome."""

    claims: Claims
    chat: ChatRequest
    link: Link
    identity: Identity
    memory: RolloutMemory
    call_id: str
    call_attempt: int
    call_index: int
    prompt_ids: Ids
    sampling: SamplingParams
    started_at_ms: int

    def intent(self) -> CallStarted:
        """The record to write before the engine is asked."""
        return CallStarted(
            call_id=self.call_id,
            rollout_id=self.claims.rollout_id,
            attempt=self.claims.attempt,
            group_id=self.claims.group_id,
            call_index=self.call_index,
            prompt_length_tokens=len(self.prompt_ids),
            prompt_digest=digest_ids(pack_ids(self.prompt_ids)),
            request_digest=self.chat.digest,
            started_at_ms=self.started_at_ms,
            call_attempt=self.call_attempt,
        )

    def outcome(
        self, answer: Answer, outcome: Outcome, message: dict[str, Any], error: str | None, now_ms: int
    ) -> ModelCall:
        """The record to write before the client sees the end."""
        verdict = judge(
            answer, outcome=outcome, prompt_ids=self.prompt_ids, sampling=self.sampling, identity=self.identity
        )
        is_shown = error is None and outcome in _ENDED and not self.link.is_gone
        return ModelCall(
            call_id=self.call_id,
            rollout_id=self.claims.rollout_id,
            attempt=self.claims.attempt,
            group_id=self.claims.group_id,
            call_index=self.call_index,
            protocol=PROTOCOL,
            adapter_version=ADAPTER_VERSION,
            model_requested=self.chat.model,
            model_served=self.identity.model,
            engine=self.identity.engine,
            engine_version=self.identity.engine_version,
            encoding=self._encoding(),
            sampling=self.sampling,
            logprob_semantics=self.identity.semantics,
            prompt=self.memory.delta(self.prompt_ids),
            output_ids=_packed(answer.ids),
            output_logprobs=pack_floats(verdict.logprobs),
            version_spans=verdict.spans,
            policy=self.claims.policy,
            finish_reason=answer.finish.reason if answer.finish else "",
            outcome=outcome,
            delivered=Delivery.UNKNOWN if is_shown else Delivery.NONE,
            trainable=not verdict.defects,
            defects=verdict.defects,
            request_digest=self.chat.digest,
            started_at_ms=self.started_at_ms,
            finished_at_ms=now_ms,
            first_token_at_ms=answer.first_token_at_ms,
            call_attempt=self.call_attempt,
            message=Json(orjson.dumps(message).decode()),
            error=error,
            harness=self.link.harness,
            state_key=self.link.state_key,
            action_key=self.link.action_key,
        )

    def _encoding(self) -> Encoding:
        kwargs = self.chat.conversation.template_kwargs
        encoding = self.identity.encoding
        return replace(encoding, template_kwargs_digest=digest_json(kwargs)) if kwargs else encoding


@dataclass(frozen=True, slots=True)
class Served:
    """A call whose outcome is in Kafka; what is left is to send it."""

    draft: Draft
    """The call as it began."""
    call: ModelCall
    """The outcome."""
    message: dict[str, Any]
    """What to show."""


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
