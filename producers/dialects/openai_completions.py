"""OpenAI Completions: a text or token ids that are the prompt as they stand. Pure.

Honoured: prompt (a text, a list of ids, or a list of one of these), temperature, max_tokens, seed, stop, stream, stream_options.
Ids reach the engine as they came. There is no chat template and no parser, so thoughts and tool calls stay in the text. Where the
client names no limit, the server's counts, and not the 16 tokens of OpenAI's own service.

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
from rollstream.producers.dialects.openai_chat import OVERRULED, usage_of
from rollstream.producers.dialects.openai_errors import error_answer, error_object
from rollstream.producers.dialects.sse import COMMENT, MEDIA_TYPE, event

_NOT_IN_DIGEST = ("stream", "stream_options", "user", "metadata", "prompt_cache_key", "safety_identifier")
_OVERRULED: dict[str, Any] = {**OVERRULED, "logit_bias": {}, "logprobs": None}
_ONLY = {"n": 1, "best_of": 1, "echo": False, "suffix": ""}
"""Parameters of which one value is served."""
_INSTEAD = {
    "n": "send the request n times",
    "best_of": "send the request several times and choose",
    "echo": "the client has the prompt already",
    "suffix": "write what stands behind into the prompt",
}
_MOST_ID = 2**32 - 1
"""Ids are 32 bits in every record."""


class Completions:
    """The protocol; see the module."""

    protocol = "openai-completions"
    version = "1"
    routes = ("/v1/completions",)
    key_headers = (b"authorization", b"x-api-key")

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`."""
        return path in self.routes

    def parse(self, incoming: Incoming) -> Exchange:
        """As in `Dialect`."""
        values = read_object(incoming.body)
        for name, only in _ONLY.items():
            if values.get(name) not in (None, only):
                raise RequestRefused(
                    f"{name}={values[name]!r}: expected {orjson.dumps(only).decode()}; {_INSTEAD[name]}", param=name
                )
        options = typed(values, "stream_options", dict) or {}
        request = Request(
            prompt=_prompt(values.get("prompt")),
            model=str(values.get("model") or ""),
            wishes=Wishes(
                temperature=number(values, "temperature", 0.0, 100.0),
                max_tokens=whole(values, "max_tokens", 1),
                seed=whole(values, "seed", -(2**63)),
                stop=stops(values, "stop"),
                overruled=overruled(values, _OVERRULED),
            ),
            is_stream=bool(values.get("stream")),
            digest=digest_request(self.protocol, values, without=_NOT_IN_DIGEST),
        )
        return CompletionExchange(request, bool(options.get("include_usage")))

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return error_answer(refusal)


@dataclass(frozen=True, slots=True)
class CompletionExchange:
    """One request."""

    request: Request
    """As in `Exchange`."""
    wants_usage: bool
    """Whether the stream ends with a usage chunk."""

    def whole(self, shown: Shown) -> bytes:
        """As in `Exchange`."""
        base = _base(shown.call_id, shown.created_s, shown.model)
        return orjson.dumps({**base, "choices": [_choice(shown.content, _finish(shown))], "usage": usage_of(shown)})

    def stream(self, call_id: str, created_s: int, model: str) -> Stream:
        """As in `Exchange`."""
        return CompletionStream(_base(call_id, created_s, model), self.wants_usage)


class CompletionStream:
    """The chunks of one answer: text, finish, usage if asked for, `[DONE]`."""

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
        chunks: list[dict[str, Any]] = [
            {"choices": [_choice(shown.content, None)]},
            {"choices": [_choice("", _finish(shown))]},
        ]
        if self._wants_usage:
            chunks.append({"choices": [], "usage": usage_of(shown)})
        return b"".join(event({**self._base, **chunk}) for chunk in chunks) + b"data: [DONE]\n\n"

    def fail(self, refusal: RequestRefused) -> bytes:
        """As in `Stream`."""
        return event({"error": error_object(refusal)})


def _base(call_id: str, created_s: int, model: str) -> dict[str, Any]:
    return {"id": call_id, "object": "text_completion", "created": created_s, "model": model}


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _finish(shown: Shown) -> str:
    return "length" if shown.end is End.LENGTH else "stop"


def _prompt(value: Any) -> str | tuple[int, ...]:
    """A text or ids; a list of one of these is that one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise RequestRefused(
                f"prompt has {len(value)} prompts: expected one; send each by itself", param="prompt"
            )
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        for index, token in enumerate(value):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MOST_ID:
                raise RequestRefused(
                    f"prompt[{index}]={str(token)[:40]}: expected an id from 0 to {_MOST_ID}", param="prompt"
                )
        return tuple(value)
    raise RequestRefused(
        f"prompt is {'empty' if value in ('', []) else type(value).__name__}, expected a text or a list of token ids",
        param="prompt",
    )
