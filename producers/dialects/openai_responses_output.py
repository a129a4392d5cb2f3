"""Answers of the Responses protocol: items, response objects and events. Pure.

An answer is a reasoning item, a message, and the tool calls, each where there is one; the message also where there is nothing
else. Where the token limit cut it, the response is `incomplete`, and a call whose arguments were cut is left out: Codex runs a
call as soon as its item is done, whatever the response says afterwards.

Source: openai 3.57 types; gateway.md §3.1, §3.3 of the design notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import End, Problem, RequestRefused, Shown, ToolCall
from rollstream.producers.dialects.openai_errors import error_object
from rollstream.producers.dialects.openai_responses_thoughts import pack_thought
from rollstream.producers.dialects.openai_responses_tools import Tools, custom_input
from rollstream.producers.dialects.sse import MEDIA_TYPE, event

_CODES = {
    Problem.OVERFLOW: "context_length_exceeded",
    Problem.RATE_LIMITED: "rate_limit_exceeded",
    Problem.INVALID: "invalid_prompt",
}
"""Codes of `response.failed` that Codex tells apart; all others are `server_error`, which it tries again."""


class Writer:
    """Writes the answer to one request.

    Args:
        said: fields of the request that a response repeats.
        tools: how to name the tools that are called.
        packs_thoughts: reasoning items have `encrypted_content`.
    """

    def __init__(self, said: Mapping[str, Any], tools: Tools, *, packs_thoughts: bool) -> None:
        self._said = said
        self._tools = tools
        self._packs_thoughts = packs_thoughts

    def begun(self, call_id: str, created_s: int, model: str) -> dict[str, Any]:
        """The response before there is an answer."""
        return {
            "id": call_id,
            "object": "response",
            "created_at": created_s,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "model": model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None,
            **self._said,
        }

    def ended(self, shown: Shown) -> dict[str, Any]:
        """The response with its answer."""
        is_cut = shown.end is End.LENGTH
        return {
            **self.begun(shown.call_id, shown.created_s, shown.model),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(shown),
            "usage": _usage(shown),
        }

    def _items(self, shown: Shown) -> list[dict[str, Any]]:
        is_cut = shown.end is End.LENGTH
        items: list[dict[str, Any]] = []
        if shown.reasoning:
            items.append(
                {
                    "type": "reasoning",
                    "id": f"rs_{shown.call_id}",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": shown.reasoning}],
                    "encrypted_content": pack_thought(shown.reasoning) if self._packs_thoughts else None,
                    "status": "completed",
                }
            )
        calls = [call for call in shown.tool_calls if not is_cut or _is_json(call.arguments)]
        if shown.content or not calls:
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{shown.call_id}",
                    "role": "assistant",
                    "content": [_text_part(shown.content)],
                    "status": "incomplete" if is_cut and not calls else "completed",
                }
            )
        items += [self._call(call, f"{shown.call_id}_{index}") for index, call in enumerate(calls)]
        return items

    def _call(self, call: ToolCall, place: str) -> dict[str, Any]:
        origin = self._tools.origin(call.name)
        named: dict[str, Any] = {"call_id": call.id, "name": origin.name}
        if origin.namespace is not None:
            named["namespace"] = origin.namespace
        if origin.is_custom:
            item = {"type": "custom_tool_call", "id": f"ctc_{place}", **named, "input": custom_input(call.arguments)}
        else:
            item = {"type": "function_call", "id": f"fc_{place}", **named, "arguments": call.arguments}
        return {**item, "status": "completed"}


class ResponseStream:
    """The events of one answer: created, in progress, those of each item, and completed, incomplete or failed.

    Codex gives a stream up in which no event comes, and a comment is none, so signs of life are events.
    """

    media_type = MEDIA_TYPE

    def __init__(self, writer: Writer, begun: dict[str, Any]) -> None:
        """Args: begun: the response before there is an answer."""
        self._writer = writer
        self._begun = begun
        self._count = 0

    def keep_alive(self) -> bytes:
        """As in `Stream`."""
        return self._head() or self._event("response.in_progress", response=self._begun)

    def end(self, shown: Shown) -> bytes:
        """As in `Stream`."""
        response = self._writer.ended(shown)
        events = [self._head()]
        for index, item in enumerate(response["output"]):
            events += self._item(index, item)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def fail(self, refusal: RequestRefused) -> bytes:
        """As in `Stream`."""
        error = {**error_object(refusal), "code": _CODES.get(refusal.problem, "server_error")}
        return self._head() + self._event(
            "response.failed", response={**self._begun, "status": "failed", "error": error}
        )

    def _head(self) -> bytes:
        """What every stream begins with; empty where it has begun."""
        if self._count:
            return b""
        return b"".join(
            self._event(kind, response=self._begun) for kind in ("response.created", "response.in_progress")
        )

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return event({"type": kind, "sequence_number": number, **values}, kind)

    def _item(self, index: int, item: dict[str, Any]) -> list[bytes]:
        """The events of one item, in order."""
        at = {"item_id": item["id"], "output_index": index}
        events = [self._event("response.output_item.added", output_index=index, item=_empty(item))]
        if item["type"] == "reasoning":
            events.append(self._part(at, "reasoning_text", item["content"][0], {}))
        elif item["type"] == "message":
            events.append(self._part(at, "output_text", item["content"][0], {"logprobs": []}))
        elif item["type"] == "function_call":
            events.append(self._text(at, "function_call_arguments", "arguments", item["arguments"]))
        else:
            events.append(self._text(at, "custom_tool_call_input", "input", item["input"]))
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        return events

    def _part(self, at: dict[str, Any], name: str, part: dict[str, Any], more: dict[str, Any]) -> bytes:
        at = {**at, "content_index": 0}
        return b"".join(
            (
                self._event("response.content_part.added", **at, part={**part, "text": ""}),
                self._text({**at, **more}, name, "text", part["text"]),
                self._event("response.content_part.done", **at, part=part),
            )
        )

    def _text(self, at: dict[str, Any], name: str, field: str, text: str) -> bytes:
        """A text in one piece, and once more as a whole."""
        return self._event(f"response.{name}.delta", **at, delta=text) + self._event(
            f"response.{name}.done", **at, **{field: text}
        )


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """An item before anything of it came."""
    nothing: dict[str, Any] = {"content": [], "arguments": "", "input": "", "encrypted_content": None}
    return {**item, **{name: value for name, value in nothing.items() if name in item}, "status": "in_progress"}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(shown: Shown) -> dict[str, Any]:
    """Cached and thought tokens are not counted apart, and the protocol wants a number."""
    return {
        "input_tokens": shown.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": shown.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": shown.prompt_tokens + shown.output_tokens,
    }


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
