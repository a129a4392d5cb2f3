"""OpenAI Responses, as Codex speaks it, without state. Pure.

Honoured: instructions, input, tools, tool_choice, chat_template_kwargs, temperature, max_output_tokens, stream, and
`reasoning.encrypted_content` of include. Refused: what refers to something kept here, and a form of the text that only a
constrained sampler could promise. What else would change the answer and does not stands in `Wishes.overruled`.

Four files: `_input` (items → messages), `_tools` (namespaces and custom tools ↔ functions), `_thoughts`, `_output` (events).

Source: openai 3.57 types; requests of Codex 0.171; gateway.md §2, §3 of the design notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.dialects.base import Exchange, Incoming, Request, RequestRefused, Shown, Stream, Wishes
from rollstream.producers.dialects.body import digest_request, number, overruled, read_object, typed, whole
from rollstream.producers.dialects.openai_chat import OVERRULED
from rollstream.producers.dialects.openai_errors import error_answer
from rollstream.producers.dialects.openai_responses_input import read_input
from rollstream.producers.dialects.openai_responses_output import ResponseStream, Writer
from rollstream.producers.dialects.openai_responses_tools import Tools, read_choice, read_tools
from rollstream.producers.engines.base import Conversation

_NOT_IN_DIGEST = (
    "stream", "stream_options", "store", "user", "metadata", "client_metadata", "safety_identifier", "service_tier",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
_OVERRULED = {
    **OVERRULED,
    "top_logprobs": 0,
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "reasoning": {},
    "context_management": [],
}
_STATE = ("previous_response_id", "conversation", "prompt")
"""Fields that refer to something that a server has kept."""
_THOUGHTS, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


class Responses:
    """The protocol; see the module."""

    protocol = "openai-responses"
    version = "1"
    routes = ("/v1/responses",)
    key_headers = (b"authorization", b"x-api-key")

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`."""
        return path in self.routes or path.startswith("/v1/responses/")

    def parse(self, incoming: Incoming) -> Exchange:
        """As in `Dialect`."""
        values = read_object(incoming.body)
        _refuse_unserved(values)
        tools = read_tools(typed(values, "tools", list) or [])
        include = typed(values, "include", list) or []
        request = Request(
            prompt=_conversation(values, tools),
            model=str(values.get("model") or ""),
            wishes=Wishes(
                temperature=number(values, "temperature", 0.0, 100.0),
                max_tokens=whole(values, "max_output_tokens", 1),
                overruled=_overruled(values, tools, include),
            ),
            is_stream=bool(values.get("stream")),
            digest=digest_request(self.protocol, _without_ids(values), without=_NOT_IN_DIGEST),
        )
        return ResponsesExchange(request, Writer(_said(values), tools, packs_thoughts=_THOUGHTS in include))

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return error_answer(refusal)


class ResponsesTokenCount:
    """How many tokens a request's prompt has."""

    routes = ("/v1/responses/input_tokens",)
    key_headers = Responses.key_headers

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`."""
        return path in self.routes

    def parse(self, incoming: Incoming) -> Conversation:
        """As in `TokenCounter`."""
        values = read_object(incoming.body)
        _refuse_unserved(values)
        return _conversation(values, read_tools(typed(values, "tools", list) or []))

    def counted(self, prompt_tokens: int) -> bytes:
        """As in `TokenCounter`."""
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": prompt_tokens})

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return error_answer(refusal)


@dataclass(frozen=True, slots=True)
class ResponsesExchange:
    """One request."""

    request: Request
    """As in `Exchange`."""
    writer: Writer
    """Writes its answer."""

    def whole(self, shown: Shown) -> bytes:
        """As in `Exchange`."""
        return orjson.dumps(self.writer.ended(shown))

    def stream(self, call_id: str, created_s: int, model: str) -> Stream:
        """As in `Exchange`."""
        return ResponseStream(self.writer, self.writer.begun(call_id, created_s, model))


def _refuse_unserved(values: Mapping[str, Any]) -> None:
    for name in _STATE:
        if values.get(name) is not None:
            raise RequestRefused(
                f"{name}={str(values[name])[:80]!r}: nothing is kept here; send the whole conversation as input",
                param=name,
            )
    if values.get("background"):
        raise RequestRefused("background is true: nothing is kept here; leave it out and wait", param="background")
    form = (typed(values, "text", dict) or {}).get("format")
    kind = form.get("type") if isinstance(form, dict) else None
    if form is not None and kind != "text":
        raise RequestRefused(
            f"text.format.type={str(kind)[:80]!r}: expected 'text'; sampling is not constrained, ask for the form in the "
            "instructions",
            param="text.format",
        )


def _conversation(values: Mapping[str, Any], tools: Tools) -> Conversation:
    return Conversation(
        messages=read_input(values),
        tools=tools.functions or None,
        tool_choice=read_choice(values.get("tool_choice"), tools)[0],
        template_kwargs=typed(values, "chat_template_kwargs", dict) or {},
    )


def _overruled(values: Mapping[str, Any], tools: Tools, include: list[Any]) -> dict[str, Any]:
    found = overruled(values, _OVERRULED)
    if tools.left_out:
        found["tools"] = list(tools.left_out)
    if not read_choice(values.get("tool_choice"), tools)[1]:
        found["tool_choice"] = values["tool_choice"]
    if _LOGPROBS in include:
        found["include"] = [_LOGPROBS]
    return found


def _without_ids(values: dict[str, Any]) -> dict[str, Any]:
    """A request without the ids of its items: clients make them up, and the model does not see them."""
    given = values.get("input")
    if not isinstance(given, list):
        return values
    return {**values, "input": [{name: value for name, value in item.items() if name != "id"} for item in given]}


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request."""
    is_parallel = typed(values, "parallel_tool_calls", bool)
    return {
        "max_output_tokens": values.get("max_output_tokens"),
        "metadata": typed(values, "metadata", dict) or {},
        "parallel_tool_calls": is_parallel is not False,
        "temperature": values.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": values.get("tool_choice") or "auto",
        "tools": values.get("tools") or [],
    }
