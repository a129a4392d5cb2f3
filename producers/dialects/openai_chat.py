"""OpenAI Chat Completions. Pure.

Honoured: messages, tools, tool_choice, parallel_tool_calls, chat_template_kwargs, temperature, max_tokens /
max_completion_tokens, seed, stop, stream, stream_options.

Source: openai 3.57 types; gateway.md §3.1, §3.3 of the design notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.dialects.base import End, Exchange, Incoming, Request, RequestRefused, Shown, Stream, Wishes
from rollstream.producers.dialects.body import (
    digest_request,
    number,
    overruled,
    read_object,
    stops,
    typed,
    whole,
)
from rollstream.producers.dialects.openai_errors import error_answer, error_object
from rollstream.producers.dialects.sse import COMMENT, MEDIA_TYPE, event
from rollstream.producers.engines.base import Conversation

_NOT_IN_DIGEST = ("stream", "stream_options", "user", "metadata", "store", "prompt_cache_key", "safety_identifier")
OVERRULED = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
"""Sampling parameters of OpenAI's protocols that the server decides → what is as good as none."""


class ChatCompletions:
    """The protocol; see the module."""

    protocol = "openai-chat"
    version = "2"
    routes = ("/v1/chat/completions",)
    key_headers = (b"authorization", b"x-api-key")

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`."""
        return path in self.routes

    def parse(self, incoming: Incoming) -> Exchange:
        """As in `Dialect`."""
        values = read_object(incoming.body)
        if values.get("n") not in (None, 1):
            raise RequestRefused(f"n={values['n']!r}: expected 1; send the request n times", param="n")
        options = values.get("stream_options")
        request = Request(
            prompt=Conversation(
                messages=_messages(values.get("messages")),
                tools=typed(values, "tools", list) or None,
                tool_choice=values.get("tool_choice"),
                template_kwargs=typed(values, "chat_template_kwargs", dict) or {},
            ),
            model=str(values.get("model") or ""),
            wishes=Wishes(
                temperature=number(values, "temperature", 0.0, 100.0),
                max_tokens=whole(values, "max_completion_tokens", 1) or whole(values, "max_tokens", 1),
                seed=whole(values, "seed", -(2**63)),
                stop=stops(values, "stop"),
                overruled=overruled(values, OVERRULED),
            ),
            is_stream=bool(values.get("stream")),
            digest=digest_request(self.protocol, values, without=_NOT_IN_DIGEST),
        )
        return ChatExchange(request, bool(isinstance(options, dict) and options.get("include_usage")))

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return error_answer(refusal)


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """One request."""

    request: Request
    """As in `Exchange`."""
    wants_usage: bool
    """Whether the stream ends with a usage chunk."""

    def whole(self, shown: Shown) -> bytes:
        """As in `Exchange`."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": shown.content or (None if shown.tool_calls else ""),
        }
        if shown.reasoning:
            message["reasoning_content"] = shown.reasoning
        if shown.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in shown.tool_calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": _finish(shown), "logprobs": None}
        return orjson.dumps(
            {
                "id": shown.call_id,
                "object": "chat.completion",
                "created": shown.created_s,
                "model": shown.model,
                "choices": [choice],
                "usage": usage_of(shown),
            }
        )

    def stream(self, call_id: str, created_s: int, model: str) -> Stream:
        """As in `Exchange`."""
        base = {"id": call_id, "object": "chat.completion.chunk", "created": created_s, "model": model}
        return ChatStream(base, self.wants_usage)


class ChatStream:
    """The chunks of one answer: role, deltas, finish, usage if asked for, `[DONE]`."""

    media_type = MEDIA_TYPE

    def __init__(self, base: dict[str, Any], wants_usage: bool) -> None:
        """Args: base: what every chunk says."""
        self._base = base
        self._wants_usage = wants_usage

    def keep_alive(self) -> bytes:
        """As in `Stream`."""
        return COMMENT

    def end(self, shown: Shown) -> bytes:
        """As in `Stream`."""
        events = [self._chunk(delta) for delta in _deltas(shown)]
        events.append(self._chunk({}, _finish(shown)))
        if self._wants_usage:
            events.append(event({**self._base, "choices": [], "usage": usage_of(shown)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def fail(self, refusal: RequestRefused) -> bytes:
        """As in `Stream`."""
        return event({"error": error_object(refusal)})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage_of(shown: Shown) -> dict[str, int]:
    """OpenAI's usage object of chat and completions."""
    return {
        "prompt_tokens": shown.prompt_tokens,
        "completion_tokens": shown.output_tokens,
        "total_tokens": shown.prompt_tokens + shown.output_tokens,
    }


def _deltas(shown: Shown) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if shown.reasoning:
        deltas.append({"reasoning_content": shown.reasoning})
    if shown.content:
        deltas.append({"content": shown.content})
    for index, call in enumerate(shown.tool_calls):
        head = {"index": index, "id": call.id, "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    return deltas


def _finish(shown: Shown) -> str:
    if shown.end is End.LENGTH:
        return "length"
    return "tool_calls" if shown.tool_calls else "stop"


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(f"messages={messages!r}: expected a list with at least one message", param="messages")
    read = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestRefused(f"{where} is no object with a role", param=where)
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": _text_of(content, where)}
        elif content is not None and not isinstance(content, str):
            raise RequestRefused(f"{where}.content is {type(content).__name__}, expected text", param=where)
        read.append(message)
    return read


def _text_of(parts: list[Any], where: str) -> str:
    """Text parts joined as they are."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise not_served(kind, where)
    return "".join(texts)


def not_served(kind: object, where: str) -> RequestRefused:
    """The refusal of an image, a file or a sound: no engine here takes them."""
    return RequestRefused(
        f"{where} has a part of type {kind!r}; only text is served, send what it shows as text",
        code="content_not_served",
        param=where,
    )
