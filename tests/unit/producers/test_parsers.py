"""Tool calls and thoughts out of sampled text."""

from __future__ import annotations

import pytest

from rollstream.producers.parsers import PARSERS, ParsedCall, ParsedText, parse_hermes, to_message


@pytest.mark.parametrize(
    "arguments",
    ['{"row": 2}', '{"a":1,  "b" : [1,\n2]}', '{"t": "caf\\u00e9 } \\" </tool_cal"}', "{}", "[1, 2]", "1.50"],
)
def test_arguments_are_the_sampled_characters(arguments: str) -> None:
    """Arguments are cut out of the text as they are, never parsed and printed again."""
    text = f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'

    parsed = parse_hermes(text)

    assert ParsedText("Let me see.\n", (ParsedCall("f", arguments),)) == parsed


def test_calls_are_all_taken_in_order() -> None:
    """Several calls, with the fields in any order and without white space."""
    text = '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call><tool_call>{"name":"g"}</tool_call>'

    parsed = parse_hermes(text)

    assert (ParsedCall("f", '{"a":1}'), ParsedCall("g", "{}")) == parsed.calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": "f"} more</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_half_a_call_is_content(text: str) -> None:
    """What is no whole call stays text, unchanged."""
    parsed = parse_hermes(text)

    assert ParsedText(text) == parsed


def test_thought_is_taken_from_the_front() -> None:
    """A thought that ended is reasoning; the template may have opened it."""
    parsed = PARSERS["hermes"]('hm\n</think>\n<tool_call>{"name": "f"}</tool_call>')

    assert ParsedText("\n", (ParsedCall("f", "{}"),), "hm\n") == parsed


def test_message_has_no_content_when_there_are_only_calls() -> None:
    """OpenAI's shape: null content beside tool calls, empty text without them."""
    call = {"id": "c-0", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert {"role": "assistant", "content": None, "tool_calls": [call]} == to_message(
        ParsedText("", (ParsedCall("f", "{}"),)), "c"
    )
    assert {"role": "assistant", "content": ""} == to_message(ParsedText(""), "c")
