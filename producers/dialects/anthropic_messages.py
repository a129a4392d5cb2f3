"""Anthropic Messages, and its count of tokens. Pure.

Honoured: system, messages, tools, tool_choice, temperature, max_tokens, stop_sequences, stream, thinking (`disabled` and
`display: omitted`), chat_template_kwargs. What is asked for and does not count is in the record: see `_overruled`.

A thought is always shown where there is one, since it was sampled. An answer holds one block at least, because many clients
read the first. A tool call whose arguments are no object, which a limit may have cut, is left out.

Source: anthropic 2.14 types; gateway.md §2.1, §3.1 of the design notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.dialects.anthropic_prompt import read_conversation, server_tools, without_billing
from rollstream.producers.dialects.anthropic_surface import AnthropicSurface, error_body
from rollstream.producers.dialects.base import (
    End,
    Exchange,
    Incoming,
    Request,
    RequestRefused,
    Shown,
    Stream,
    ToolCall,
    Wishes,
)
from rollstream.producers.dialects.body import digest_request, number, overruled, read_object, stops, typed, whole
from rollstream.producers.dialects.sse import MEDIA_TYPE, event
from rollstream.producers.engines.base import Conversation
from rollstream.schemas.identity import digest_bytes

_NOT_IN_DIGEST = (
    "stream", "metadata", "service_tier", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id",
)  # fmt: skip
_TRUNCATION = {"top_p": 1, "top_k": -1}
_PING = event({"type": "ping"}, "ping")


class Messages(AnthropicSurface):
    """The protocol; see the module."""

    protocol = "anthropic-messages"
    version = "1"
    routes = ("/v1/messages",)

    def parse(self, incoming: Incoming) -> Exchange:
        """As in `Dialect`."""
        values = without_billing(read_object(incoming.body))
        conversation = read_conversation(values)
        if conversation.messages[-1]["role"] == "assistant":
            raise RequestRefused(
                "messages ends with a message of the assistant; no answer here goes on from one, end with one of the user",
                param="messages",
            )
        if values.get("container") is not None:
            raise RequestRefused("container is set; no code is run here and no state is kept", param="container")
        thinking = typed(values, "thinking", dict) or {}
        request = Request(
            prompt=conversation,
            model=str(values.get("model") or ""),
            wishes=Wishes(
                temperature=number(values, "temperature", 0.0, 100.0),
                max_tokens=whole(values, "max_tokens", 1),
                stop=stops(values, "stop_sequences"),
                overruled=_overruled(values),
            ),
            is_stream=bool(values.get("stream")),
            digest=digest_request(self.protocol, values, without=_NOT_IN_DIGEST),
        )
        return MessagesExchange(request, hides_thoughts=thinking.get("display") == "omitted")


class MessagesTokenCount(AnthropicSurface):
    """How many tokens a prompt has."""

    routes = ("/v1/messages/count_tokens",)

    def parse(self, incoming: Incoming) -> Conversation:
        """As in `TokenCounter`."""
        return read_conversation(without_billing(read_object(incoming.body)))

    def counted(self, prompt_tokens: int) -> bytes:
        """As in `TokenCounter`."""
        return orjson.dumps({"input_tokens": prompt_tokens})


@dataclass(frozen=True, slots=True)
class MessagesExchange:
    """One request."""

    request: Request
    """As in `Exchange`."""
    hides_thoughts: bool
    """Whether a thought is shown by its signature alone."""

    def whole(self, shown: Shown) -> bytes:
        """As in `Exchange`."""
        blocks = _blocks(shown, self.hides_thoughts)
        message = _message(shown.call_id, shown.model, [block.whole for block in blocks], _usage(shown))
        return orjson.dumps({**message, **_end(shown, blocks)})

    def stream(self, call_id: str, created_s: int, model: str) -> Stream:
        """As in `Exchange`."""
        return MessagesStream(call_id, model, self.hides_thoughts)


class MessagesStream:
    """The events of one answer: start, ping, each block, delta, stop."""

    media_type = MEDIA_TYPE

    def __init__(self, call_id: str, model: str, hides_thoughts: bool) -> None:
        self._call_id = call_id
        self._model = model
        self._hides_thoughts = hides_thoughts
        self._has_begun = False

    def keep_alive(self) -> bytes:
        """As in `Stream`."""
        return self._begin() or _PING

    def end(self, shown: Shown) -> bytes:
        """As in `Stream`."""
        blocks = _blocks(shown, self._hides_thoughts)
        parts = [self._begin(shown.prompt_tokens)]
        for index, block in enumerate(blocks):
            at = {"index": index}
            parts.append(_event("content_block_start", {**at, "content_block": block.opening}))
            parts += [_event("content_block_delta", {**at, "delta": delta}) for delta in block.deltas]
            parts.append(_event("content_block_stop", at))
        parts.append(_event("message_delta", {"delta": _end(shown, blocks), "usage": _usage(shown)}))
        parts.append(_event("message_stop", {}))
        return b"".join(parts)

    def fail(self, refusal: RequestRefused) -> bytes:
        """As in `Stream`."""
        return self._begin() + event(error_body(refusal), "error")

    def _begin(self, prompt_tokens: int = 0) -> bytes:
        """Start and ping, once. Args: prompt_tokens: 0 while they are not known; the end says them again."""
        if self._has_begun:
            return b""
        self._has_begun = True
        message = _message(self._call_id, self._model, [], _tokens(prompt_tokens, 0))
        return _event("message_start", {"message": {**message, "stop_reason": None, "stop_sequence": None}}) + _PING


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of an answer."""

    whole: dict[str, Any]
    """As a whole answer has it."""
    opening: dict[str, Any]
    """As a stream begins it."""
    deltas: tuple[dict[str, Any], ...]
    """What a stream adds, in order."""


def _blocks(shown: Shown, hides_thoughts: bool) -> list[_Block]:
    blocks = []
    if shown.reasoning:
        blocks.append(_thinking("" if hides_thoughts else shown.reasoning, _signature(shown.call_id, 0)))
    calls = [_tool_use(call) for call in shown.tool_calls]
    kept = [call for call in calls if call is not None]
    if shown.content or not (blocks or kept):
        blocks.append(_text(shown.content))
    return blocks + kept


def _thinking(text: str, signature: str) -> _Block:
    signed = {"type": "signature_delta", "signature": signature}
    return _Block(
        {"type": "thinking", "thinking": text, "signature": signature},
        {"type": "thinking", "thinking": "", "signature": ""},
        ({"type": "thinking_delta", "thinking": text}, signed) if text else (signed,),
    )


def _text(text: str) -> _Block:
    return _Block(
        {"type": "text", "text": text},
        {"type": "text", "text": ""},
        ({"type": "text_delta", "text": text},),
    )


def _tool_use(call: ToolCall) -> _Block | None:
    """A tool call with the very characters of its arguments; None where they are no object."""
    arguments = call.arguments.strip() or "{}"
    try:
        if not isinstance(orjson.loads(arguments), dict):
            return None
    except orjson.JSONDecodeError:
        return None
    head = {"type": "tool_use", "id": call.id, "name": call.name}
    return _Block(
        {**head, "input": orjson.Fragment(arguments.encode())},
        {**head, "input": {}},
        ({"type": "input_json_delta", "partial_json": arguments},),
    )


def _signature(call_id: str, index: int) -> str:
    """Of the thought in this block; equal for a replay, since clients send it back."""
    return digest_bytes(b"thinking", call_id.encode(), str(index).encode())


def _end(shown: Shown, blocks: list[_Block]) -> dict[str, Any]:
    if shown.end is End.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if shown.end is End.STOP_STRING:
        return {"stop_reason": "stop_sequence", "stop_sequence": shown.stop_string}
    has_calls = any(block.whole["type"] == "tool_use" for block in blocks)
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def _message(call_id: str, model: str, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "usage": usage,
    }


def _usage(shown: Shown) -> dict[str, int]:
    return _tokens(shown.prompt_tokens, shown.output_tokens)


def _tokens(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """Usage in which nothing is put down to a cache, so that the prompt's tokens are one number."""
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _event(kind: str, values: Mapping[str, Any]) -> bytes:
    return event({"type": kind, **values}, kind)


def _overruled(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for and does not count: truncated sampling, a forced shape, what servers of Anthropic do by themselves."""
    found = overruled(values, _TRUNCATION)
    within = (
        ("thinking", "budget_tokens"),
        ("tool_choice", "disable_parallel_tool_use"),
        ("output_config", "format"),
        ("output_config", "effort"),
    )
    for name, inner in within:
        value = (typed(values, name, dict) or {}).get(inner)
        if value:
            found[f"{name}.{inner}"] = value
    if values.get("context_management"):
        found["context_management"] = values["context_management"]
    if values.get("mcp_servers"):  # with their tokens, which no record may hold
        found["mcp_servers"] = "left out"
    left_out = server_tools(values)
    return {**found, "tools": left_out} if left_out else found
