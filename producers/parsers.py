"""From sampled text to the assistant message a client sees: tool calls and thoughts taken out of the text.

Only for showing: the record holds the ids. Arguments are the very characters that were sampled, never parsed and printed again,
so that a client's echo renders to the same tokens. A parser is one function here and one line in `PARSERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call."""

    name: str
    """The function."""
    arguments: str
    """Its arguments as sampled; JSON text if the model wrote JSON."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A sampled text, taken apart."""

    content: str
    """What is neither thought nor tool call; may be empty."""
    calls: tuple[ParsedCall, ...] = ()
    """Tool calls, in order."""
    reasoning: str | None = None
    """The thought, if there was one."""


def parse_none(text: str) -> ParsedText:
    """Everything is content."""
    return ParsedText(text)


def parse_hermes(text: str) -> ParsedText:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, after some content.

    A call that was cut short or is no such JSON leaves the whole text as content: half a call is not a call. Text after
    the first call that belongs to none is not shown, as other servers of this format do.

    Source: the `hermes` tool parser of vLLM 0.33.
    """
    start = text.find(_OPEN)
    if start < 0:
        return ParsedText(text)
    calls = []
    at = start
    while at >= 0:
        body = at + len(_OPEN)
        end = text.find(_CLOSE, body)
        call = _hermes_call(text, body) if end >= 0 else None
        if call is None:
            return ParsedText(text)
        calls.append(call)
        at = text.find(_OPEN, end)
    return ParsedText(text[:start], tuple(calls))


def with_thoughts(parse: Callable[[str], ParsedText]) -> Callable[[str], ParsedText]:
    """A parser that first takes `<think>...</think>` from the front of the text."""

    def parse_after_thought(text: str) -> ParsedText:
        head, tag, rest = text.partition("</think>")
        if not tag or _OPEN in head:
            return parse(text)
        parsed = parse(rest)
        return ParsedText(parsed.content, parsed.calls, head.removeprefix("<think>"))

    return parse_after_thought


PARSERS: dict[str, Callable[[str], ParsedText]] = {
    "none": parse_none,
    "hermes": with_thoughts(parse_hermes),
}
"""Parser name → parser."""


def to_message(parsed: ParsedText, call_ids: str) -> dict[str, object]:
    """The assistant message in OpenAI's shape.

    Args: call_ids: start of the tool calls' ids; equal for equal calls, so that a replay shows the same message.
    """
    message: dict[str, object] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {"id": f"{call_ids}-{index}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for index, c in enumerate(parsed.calls)
        ]
    return message


def _hermes_call(text: str, at: int) -> ParsedCall | None:
    """The call whose JSON object starts at or after `at`; None if there is no well-formed one."""
    try:
        at = _skip(text, at)
        if text[at] != "{":
            return None
        name, arguments = None, "{}"
        while text[at] != "}":
            key, at = _DECODER.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, at)
            if text[at] != ":":
                return None
            start = _skip(text, at + 1)
            value, at = _DECODER.raw_decode(text, start)
            if key == "name":
                name = value
            elif key in ("arguments", "parameters"):
                arguments = value if isinstance(value, str) else text[start:at]
            at = _skip(text, at)
            if text[at] not in ",}":
                return None
        is_closed = text.startswith(_CLOSE, _skip(text, at + 1))
    except (ValueError, IndexError):
        return None
    return ParsedCall(name, arguments) if isinstance(name, str) and is_closed else None


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at
