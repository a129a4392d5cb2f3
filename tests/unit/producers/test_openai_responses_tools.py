"""Tools of the Responses protocol as functions, and calls of them back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.producers.dialects.base import RequestRefused
from rollstream.producers.dialects.openai_responses_tools import (
    Origin,
    custom_arguments,
    custom_input,
    read_choice,
    read_tools,
)

SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
SEND = {"type": "function", "name": "send", "description": "Sends.", "parameters": SCHEMA, "strict": True}
READ = {"type": "function", "name": "read"}
MAIL = {"type": "namespace", "name": "mail", "description": "All about mail.", "tools": [SEND, READ]}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}  # fmt: skip


def test_namespaces_are_flattened_and_known_again() -> None:
    """Codex's namespaces reach the model and its calls come back to them (vllm#49493, litellm#36182)."""
    tools = read_tools([SEND, MAIL])

    assert ["send", "mail__send", "mail__read"] == [tool["function"]["name"] for tool in tools.functions]
    assert (Origin("send"), Origin("send", "mail")) == (tools.origin("send"), tools.origin("mail__send"))
    assert [
        {"name": "mail__send", "description": "All about mail.\n\nSends.", "parameters": SCHEMA},
        {"name": "mail__read", "parameters": {"type": "object", "properties": {}}},
    ] == [tool["function"] for tool in tools.functions[1:]]


def test_name_that_the_model_made_up_is_a_function() -> None:
    """The client says that there is none; it need not look like a namespace to be one."""
    assert Origin("mail__nothing") == read_tools([MAIL]).origin("mail__nothing")


def test_custom_tool_is_a_function_with_one_text() -> None:
    """Its grammar is told, for nothing enforces it."""
    tools = read_tools([PATCH, {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}])

    function = tools.functions[0]["function"]
    text = function["parameters"]["properties"]["input"]
    assert (["input"], "string", "Patches.") == (
        function["parameters"]["required"],
        text["type"],
        function["description"],
    )
    assert "lark grammar:\nstart: x" in text["description"]
    assert [Origin("apply_patch", None, True), Origin("c", "n", True)] == [
        tools.origin("apply_patch"),
        tools.origin("n__c"),
    ]


@pytest.mark.parametrize("text", ["", "a", '*** Begin\n"é😀"\\', '{"input": "x"}'])
def test_custom_input_survives_the_function(text: str) -> None:
    """Whatever it is."""
    assert text == custom_input(custom_arguments(text))


@pytest.mark.parametrize("arguments", ["no json", '{"other": 1}', '{"input": 1}', "[1]", "{half", ""])
def test_arguments_that_are_not_as_asked_for_are_the_input(arguments: str) -> None:
    """The client sees what the model wrote, and says what is wrong with it."""
    assert arguments == custom_input(arguments)


def test_hosted_tools_are_left_out_by_name() -> None:
    """Nobody here can run them, and the record says so."""
    tools = read_tools(
        [{"type": "web_search"}, SEND, {"type": "mcp", "server_label": "x"}, {"type": "local_shell"}, {}]
    )

    assert ("web_search", "mcp", "local_shell", "None") == tools.left_out
    assert 1 == len(tools.functions)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["x"], "tools[0] is str"),
        ([{"type": "function"}], "tools[0].name='None'"),
        ([{"type": "function", "name": ""}], "tools[0].name=''"),
        ([{"type": "custom", "name": 3}], "tools[0].name='3'"),
        ([SEND | {"parameters": []}], "tools[0].parameters is list"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools is NoneType"),
        ([{"type": "namespace", "name": "n", "tools": [1]}], "tools[0].tools[0] is int"),
        ([MAIL, SEND | {"name": "mail__send"}], "another tool is called 'mail__send'"),
        ([PATCH, SEND | {"name": "apply_patch"}], "another tool is called 'apply_patch'"),
    ],
)
def test_bad_tool_is_named(values: list[Any], says: str) -> None:
    """Two tools of one name could not be told apart when they are called."""
    with pytest.raises(RequestRefused) as refused:
        read_tools(values)

    assert says in str(refused.value)
    assert refused.value.param


@pytest.mark.parametrize(
    ("choice", "expected", "is_whole"),
    [
        (None, None, True),
        ("auto", "auto", True),
        ("none", "none", True),
        ("required", "required", True),
        ({"type": "function", "name": "send"}, {"type": "function", "function": {"name": "send"}}, True),
        (
            {"type": "function", "namespace": "mail", "name": "send"},
            {"type": "function", "function": {"name": "mail__send"}},
            True,
        ),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "send"}]}, "required", False),
        ({"type": "allowed_tools", "mode": ["auto"]}, "auto", False),
        ({"type": "web_search_preview"}, "auto", False),
    ],
)
def test_choice_is_chats(choice: Any, expected: Any, is_whole: bool) -> None:
    """By the flat name; what chat cannot say is noted."""
    assert (expected, is_whole) == read_choice(choice, read_tools([SEND, MAIL, PATCH]))


@pytest.mark.parametrize(
    "choice", ["any", 3, [], {}, {"type": 3}, {"type": "function"}, {"type": "function", "name": "x"}]
)
def test_choice_of_nothing_is_refused(choice: Any) -> None:
    """It names the field."""
    with pytest.raises(RequestRefused) as refused:
        read_choice(choice, read_tools([SEND]))

    assert "tool_choice" == refused.value.param


def test_functions_go_into_json() -> None:
    """As the engine gets them."""
    assert json.dumps(read_tools([SEND, MAIL, PATCH]).functions)
