"""A call on its way through the gateway: as it arrived, and as its answer is shown. Pure; its records are `CallDraft`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.capability import Claims
from rollstream.producers.dialects.base import Dialect, End, Request, Shown, ToolCall
from rollstream.producers.draft import CallHead
from rollstream.producers.engines.base import Conversation, Ids
from rollstream.producers.rollout_memory import Connection, OpenCall, RolloutMemory
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.records import ModelCall, Outcome

_ENDS = {Outcome.COMPLETED: End.STOP, Outcome.STOP_STRING: End.STOP_STRING, Outcome.LENGTH: End.LENGTH}


@dataclass(slots=True)
class Link(Connection):
    """The connection that a call is served on, and what its headers say."""

    harness: str = ""
    """The client's user agent."""
    state_key: str | None = None
    """Environment state before the action, if the client says."""
    action_key: str | None = None
    """Canonical action, if the client says."""
    is_retry: bool = False
    """The client says that it sends this again."""
    is_answered: bool = False
    """What the client gets, or that it gets nothing, is settled."""


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
    open_call: OpenCall
    """Its identity, as further requests may continue it."""
    call_index: int
    """Its place among the calls of the rollout."""
    arrived_at_ms: int
    """UTC epoch milliseconds."""

    @property
    def call_id(self) -> str:
        """The call; the same again for a retry of what did not arrive."""
        return self.open_call.call_id

    def head(self) -> CallHead:
        """What its records say of it."""
        prompt = self.request.prompt
        tools, kwargs = (prompt.tools, prompt.template_kwargs) if isinstance(prompt, Conversation) else (None, {})
        return CallHead(
            call_id=self.open_call.call_id,
            call_attempt=self.open_call.call_attempt,
            call_index=self.call_index,
            rollout_id=self.claims.rollout_id,
            attempt=self.claims.attempt,
            group_id=self.claims.group_id,
            policy=self.claims.policy,
            protocol=self.dialect.protocol,
            adapter_version=self.dialect.version,
            request_digest=self.request.digest,
            started_at_ms=self.arrived_at_ms,
            model_requested=self.request.model,
            tools_digest=digest_bytes(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)) if tools else "",
            template_kwargs=kwargs,
            sampling_requested=self.request.wishes.overruled,
            harness=self.link.harness,
            state_key=self.link.state_key,
            action_key=self.link.action_key,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A call whose outcome is in Kafka; what is left is to send it."""

    ticket: Ticket
    """The call as it arrived."""
    call: ModelCall
    """The outcome."""
    message: dict[str, Any]
    """The assistant message in OpenAI's shape, as the engine's parsers made it."""
    prompt_ids: Ids
    """The whole prompt, shape [T]."""

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
