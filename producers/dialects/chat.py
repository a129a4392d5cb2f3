"""OpenAI chat completions: request body → `ChatRequest`, outcome → response object or stream, error → error object. Pure.

Permissive on what it does not know, strict on what it cannot honour. Honoured: messages, tools, tool_choice,
chat_template_kwargs, temperature, max_tokens / max_completion_tokens, seed, stop, stream, stream_options. The server decides
`n=1`, `top_p=1`, `top_k=-1` and no penalties, whatever the client asks: with a truncated or penalised distribution the
log-probabilities would need the mask of what was left. Unknown fields are ignored.

Source: openai 3.57 types; gateway.md §3.1, §3.3 of the design notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.engines.base import Conversation
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.records import SamplingParams

PROTOCOL = "openai-chat"
ADAPTER_VERSION = "1"
"""Counts up when the same body would be turned into other messages, or the same tokens into another answer."""

_NOT_IN_DIGEST = ("stream", "stream_options", "user", "metadata", "store")
_FINISH = {"stop": "stop", "length": "length", "repetition": "stop"}


class RequestRefused(Exception):
    """A request that gets an error answer. Control flow: carries what the answer says."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request."""

    conversation: Conversation
    """What to render."""
    model: str
    """Model name as sent; recorded, never used."""
    temperature: float | None
    """None: the client named none."""
    max_tokens: int | None
    """None: the client named none."""
    seed: int | None
    """None: the client named none."""
    stop: tuple[str, ...]
    """Stop strings."""
    is_stream: bool
    """Whether the answer is a stream of events."""
    wants_usage: bool
    """Whether the stream ends with a usage chunk."""
    digest: str
    """Of the body without what does not change the answer, such as `stream`."""

    def sampling(self, *, temperature: float, max_tokens: int, room_tokens: int) -> SamplingParams:
        """The effective sampling parameters.

        Args: temperature, max_tokens: where the client named none. room_tokens: what the context leaves; at least 1.
        """
        return SamplingParams(
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=1.0,
            top_k=-1,
            max_tokens=min(self.max_tokens or max_tokens, room_tokens),
            seed=self.seed,
            stop=self.stop,
        )


def parse_chat(body: bytes) -> ChatRequest:
    """Read a request body.

    Raises: RequestRefused: 400, saying which field is wrong.
    """
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise RequestRefused(f"the body is no JSON: {cause}", code="invalid_json") from cause
    if not isinstance(values, dict):
        raise RequestRefused(f"the body is {type(values).__name__}, expected an object", code="invalid_json")
    if values.get("n") not in (None, 1):
        raise RequestRefused(f"n={values['n']!r}: expected 1; send the request n times", param="n")
    options = values.get("stream_options") or {}
    rest = {name: value for name, value in values.items() if name not in _NOT_IN_DIGEST}
    return ChatRequest(
        conversation=Conversation(
            messages=_messages(values.get("messages")),
            tools=_typed(values, "tools", list) or None,
            tool_choice=values.get("tool_choice"),
            template_kwargs=_typed(values, "chat_template_kwargs", dict) or {},
        ),
        model=str(values.get("model") or ""),
        temperature=_number(values, "temperature", 0.0, 100.0),
        max_tokens=_whole(values, "max_completion_tokens", 1) or _whole(values, "max_tokens", 1),
        seed=_whole(values, "seed", -(2**63), 2**63 - 1),
        stop=_stops(values.get("stop")),
        is_stream=bool(values.get("stream")),
        wants_usage=bool(isinstance(options, dict) and options.get("include_usage")),
        digest=digest_bytes(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS)),
    )


def completion(
    *, call_id: str, created_s: int, model: str, message: dict[str, Any], finish_reason: str, usage: dict[str, int]
) -> bytes:
    """A whole answer."""
    return orjson.dumps(
        {
            "id": call_id,
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": _finish(finish_reason, message),
                    "logprobs": None,
                }
            ],
            "usage": usage,
        }
    )


def stream_events(
    *,
    call_id: str,
    created_s: int,
    model: str,
    message: dict[str, Any],
    finish_reason: str,
    usage: dict[str, int] | None,
) -> bytes:
    """A whole answer as server-sent events: role, deltas, finish, usage (if given), `[DONE]`."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning_content"):
        deltas.append({"reasoning_content": message["reasoning_content"]})
    if message.get("content"):
        deltas.append({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        head = {"index": index, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": function["name"], "arguments": ""}}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
    base = {"id": call_id, "object": "chat.completion.chunk", "created": created_s, "model": model}
    ends: list[tuple[dict[str, Any], str | None]] = [(delta, None) for delta in deltas]
    ends.append(({}, _finish(finish_reason, message)))
    events = [_event({**base, "choices": [{"index": 0, "delta": d, "finish_reason": f}]}) for d, f in ends]
    if usage is not None:
        events.append(_event({**base, "choices": [], "usage": usage}))
    return b"".join(events) + b"data: [DONE]\n\n"


KEEP_ALIVE = b": working\n\n"
"""An event that every client skips."""


def error_body(error: RequestRefused) -> bytes:
    """An error answer."""
    return orjson.dumps(
        {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}
    )


def error_event(error: RequestRefused) -> bytes:
    """An error in a stream that has begun; nothing follows it, so no client takes it for an end."""
    return b"data: " + error_body(error) + b"\n\n"


def usage_of(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": total}


def context_overflow(prompt_tokens: int, limit_tokens: int) -> RequestRefused:
    """The error that agents know an overflow by."""
    return RequestRefused(
        f"This model's maximum context length is {limit_tokens} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(values) + b"\n\n"


def _finish(reason: str, message: dict[str, Any]) -> str:
    if reason == "length":
        return "length"
    return "tool_calls" if message.get("tool_calls") else _FINISH.get(reason, "stop")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(f"messages={messages!r}: expected a list with at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestRefused(f"{where} is no object with a role", param=where)
        content = message.get("content")
        if isinstance(content, list):
            messages[index] = {**message, "content": _text_of(content, where)}
        elif content is not None and not isinstance(content, str):
            raise RequestRefused(f"{where}.content is {type(content).__name__}, expected text", param=where)
    return messages


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
            raise RequestRefused(f"{where} has a part of type {kind!r}; only text is served", param=where)
    return "".join(texts)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise RequestRefused(f"stop={stop!r}: expected a text or a list of texts", param="stop")
    return tuple(stops)


def _typed(values: dict[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestRefused(f"{name} is {type(value).__name__}, expected {kind.__name__}", param=name)
    return value


def _number(values: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestRefused(f"{name}={value!r}: expected a number from {low:g} to {high:g}", param=name)
    return float(value)


def _whole(values: dict[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestRefused(f"{name}={value!r}: expected an integer of at least {low}", param=name)
    if high is not None and value > high:
        raise RequestRefused(f"{name}={value!r}: expected an integer of at most {high}", param=name)
    return value
