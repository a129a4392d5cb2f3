"""The two records of a model call, from what is known when it begins and from what the engine answers. Pure.

Whoever serves a call makes them here, so that they say the same of it: the gateway (`gateway/service.py`) and a rollout
function that samples by itself (`direct.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from rollstream.producers.call import judge
from rollstream.producers.engines.base import Answer, Identity, Ids
from rollstream.schemas.identity import canonical_json, digest_json
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


@dataclass(frozen=True, slots=True)
class CallHead:
    """Which call it is, whose it is, and what was asked; the fields are those of `ModelCall`."""

    call_id: str
    """The call; the same again for a retry of what did not arrive."""
    call_attempt: int
    """Its attempt, from 0."""
    call_index: int
    """Its place among the calls of the rollout."""
    rollout_id: str
    """The rollout."""
    attempt: int
    """The rollout's attempt."""
    group_id: str
    """The rollout's group."""
    policy: str
    """Name of the policy."""
    protocol: str
    """Client protocol."""
    adapter_version: str
    """Version of what reads and writes it."""
    request_digest: str
    """Digest of what was asked."""
    started_at_ms: int
    """UTC epoch milliseconds."""
    model_requested: str = ""
    """Model name as asked for."""
    tools_digest: str = ""
    """Digest of the tools as they are rendered; empty without tools."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that the request gave."""
    sampling_requested: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for and decided otherwise."""
    harness: str = ""
    """The client's user agent."""
    state_key: str | None = None
    """Environment state before the action."""
    action_key: str | None = None
    """Canonical action."""


@dataclass(frozen=True, slots=True)
class CallDraft:
    """A call that has a prompt and not yet an outcome."""

    head: CallHead
    """The call."""
    identity: Identity
    """The engine as it was when the call began."""
    prompt_ids: Ids
    """The prompt, shape [T]."""
    delta: PromptDelta
    """The prompt as it is written: the same in the intent and in the outcome, whatever became a base between."""
    sampling: SamplingParams
    """How it is sampled."""
    version_before: int | None
    """The policy version that the engine was taken to serve."""

    def intent(self) -> CallStarted:
        """The record to write before the engine is asked."""
        head, delta = self.head, self.delta
        return CallStarted(
            call_id=head.call_id,
            rollout_id=head.rollout_id,
            attempt=head.attempt,
            group_id=head.group_id,
            call_index=head.call_index,
            prompt_length_tokens=delta.length,
            prompt_digest=delta.digest,
            request_digest=head.request_digest,
            started_at_ms=head.started_at_ms,
            call_attempt=head.call_attempt,
            protocol=head.protocol,
            prompt_suffix=delta.suffix,
            prompt_base_call_id=delta.base_call_id,
            prompt_base_len=delta.base_len,
            sampling=self.sampling.as_json(),
        )

    def outcome(
        self,
        answer: Answer,
        outcome: Outcome,
        delivered: Delivery,
        *,
        message: Mapping[str, Any],
        error: str | None,
        now_ms: int,
        version_after: int | None,
    ) -> ModelCall:
        """The record to write before anybody acts on the answer.

        Args: message: the assistant message as it is shown. error: what went wrong, if anything.
        """
        head, identity, finish = self.head, answer.served or self.identity, answer.finish
        verdict = judge(
            answer,
            outcome=outcome,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            identity=identity,
            versions=(self.version_before, version_after),
        )
        return ModelCall(
            call_id=head.call_id,
            rollout_id=head.rollout_id,
            attempt=head.attempt,
            group_id=head.group_id,
            call_index=head.call_index,
            protocol=head.protocol,
            adapter_version=head.adapter_version,
            model_requested=head.model_requested,
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
            policy=head.policy,
            finish_reason=finish.reason if finish else "",
            outcome=outcome,
            delivered=delivered,
            trainable=not verdict.defects,
            defects=verdict.defects,
            request_digest=head.request_digest,
            started_at_ms=head.started_at_ms,
            finished_at_ms=now_ms,
            first_token_at_ms=answer.first_token_at_ms,
            call_attempt=head.call_attempt,
            message=Json(orjson.dumps(message).decode()),
            error=error,
            harness=head.harness,
            state_key=head.state_key,
            action_key=head.action_key,
            sampling_requested=Json(canonical_json(dict(head.sampling_requested)).decode()),
            stop_reason=(finish.stop_string if finish else None) or "",
            engine_fingerprint=identity.fingerprint,
            tools_digest=head.tools_digest,
            adapter=identity.adapter,
            adapter_digest=identity.adapter_digest,
            version_before=self.version_before,
            version_after=version_after,
            pause_mode=answer.pause_mode,
            cache_cleared=answer.cache_cleared,
        )

    def _encoding(self) -> Encoding:
        kwargs, encoding = dict(self.head.template_kwargs), self.identity.encoding
        return replace(encoding, template_kwargs_digest=digest_json(kwargs)) if kwargs else encoding


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
    return pack_ids([token for token in ids if type(token) is int and 0 <= token <= 0xFFFFFFFF])
