"""What a request of Anthropic's protocol shows the model, block by block."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.producers.dialects.anthropic_messages import Messages, MessagesTokenCount
from rollstream.producers.dialects.base import Incoming, RequestRefused
from rollstream.producers.engines.base import Conversation

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read_file", "description": "Reads.", "input_schema": SCHEMA}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


def request(**values: Any) -> Any:
    return Messages().parse(Incoming(json.dumps({"max_tokens": 9, "messages": HI, **values}).encode())).request


def shown(*messages: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    prompt = request(messages=[*messages, *HI], **values).prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages[:-1]


def refusal(**values: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        request(**values)
    return refused.value


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in texts]


def test_system_stands_first_and_its_blocks_have_lines_of_their_own() -> None:
    """As a text or as blocks."""
    assert [{"role": "system", "content": "a\nb"}] == shown(system=text("a", "b"))
    assert [{"role": "system", "content": "a"}] == shown(system="a")
    assert [] == shown(system="") == shown(system=[])


def test_system_message_within_the_list_stays_where_it_is() -> None:
    """A reminder that is moved to the head would change the first token of every prompt (gateway.md §4, row 12)."""
    within = [HI[0], {"role": "system", "content": text("remember")}]

    assert [
        {"role": "system", "content": "head"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "remember"},
    ] == shown(*within, system="head")


def test_prompt_grows_only_at_its_end_when_reminders_are_added() -> None:
    """Row 12: each conversation's messages begin with those of the one before."""
    first = [HI[0]]
    second = [*first, {"role": "assistant", "content": "a"}, {"role": "system", "content": "reminder"}, HI[0]]

    shorter = request(messages=first, system="head").prompt.messages
    longer = request(messages=second, system="head").prompt.messages

    assert shorter == longer[: len(shorter)]


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (text("x-anthropic-billing-header: cc_version=2.1.197; cch=1f;", "You are."), "You are."),
        (text("x-anthropic-billing-header: cch=1f;\nYou are."), "You are."),
        ("x-anthropic-billing-header: cch=1f;\n\nYou are.", "You are."),
    ],
    ids=["block", "line of a block", "line of a text"],
)
def test_billing_line_is_not_in_the_prompt(system: Any, left: str) -> None:
    """Claude Code's nonce changes with every call; the model would be trained on it."""
    assert [{"role": "system", "content": left}] == shown(system=system)


def test_system_that_is_only_a_billing_line_is_none() -> None:
    """No empty system message is left behind."""
    assert [] == shown(system=text("x-anthropic-billing-header: cch=1f;"))
    assert [] == shown(system="x-anthropic-billing-header: cch=1f;")


def test_billing_words_elsewhere_are_text() -> None:
    """Only in front of a block of the system prompt."""
    said = {"role": "user", "content": "x-anthropic-billing-header: what is it?"}

    assert [said] == shown(said)
    assert "see x-anthropic-billing-header" == shown(system="see x-anthropic-billing-header")[0]["content"]


def test_answer_with_thought_text_and_two_tools_goes_back_as_one_message() -> None:
    """Thoughts beside the text; arguments as text; ids as they are."""
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        *text("I look."),
        {"type": "tool_use", "id": "call_1-0", "name": "read_file", "input": {"path": "é.txt"}},
        {"type": "tool_use", "id": "weird id!", "name": "stop", "input": {}},
    ]

    (message,) = shown({"role": "assistant", "content": blocks})

    assert ("assistant", "I look.", "hm") == (message["role"], message["content"], message["reasoning_content"])
    assert [("call_1-0", "read_file", '{"path":"é.txt"}'), ("weird id!", "stop", "{}")] == [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]


def test_thought_that_was_hidden_leaves_nothing() -> None:
    """Only its signature comes back."""
    hidden = {"type": "thinking", "thinking": "", "signature": "s"}

    assert [{"role": "assistant", "content": "a"}] == shown({"role": "assistant", "content": [hidden, *text("a")]})


def test_tool_results_are_messages_of_their_own_in_order() -> None:
    """With what the user says between and behind them."""
    blocks = [
        {"type": "tool_result", "tool_use_id": "b", "content": "two"},
        {"type": "tool_result", "tool_use_id": "a", "content": text("one", "more")},
        {"type": "tool_result", "tool_use_id": "c"},
        *text("now", "go on"),
        {"type": "tool_result", "tool_use_id": "d", "content": []},
    ]

    assert [
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "tool", "tool_call_id": "a", "content": "one\nmore"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "now\ngo on"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
    ] == shown({"role": "user", "content": blocks})


@pytest.mark.parametrize(
    ("said", "seen"), [("no such file", "Error: no such file"), ("Error: no", "Error: no"), ("", "Error: ")]
)
def test_tool_error_is_shown_as_one(said: str, seen: str) -> None:
    """The model has to see that it failed."""
    block = {"type": "tool_result", "tool_use_id": "a", "content": said}

    assert seen == shown({"role": "user", "content": [{**block, "is_error": True}]})[0]["content"]
    assert said == shown({"role": "user", "content": [{**block, "is_error": False}]})[0]["content"]


def test_user_with_no_block_is_still_a_turn() -> None:
    """Dropping it would join two answers."""
    assert [{"role": "user", "content": ""}] == shown({"role": "user", "content": []})


@pytest.mark.parametrize(
    ("block", "seen"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "d"),
        ({"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "d"}}, "T\nC\nd"),
        ({"type": "document", "source": {"type": "content", "content": text("a", "b")}}, "a\nb"),
        ({"type": "search_result", "title": "T", "source": "S", "content": text("a")}, "T\nS\na"),
        ({"type": "tool_reference", "tool_name": "read_file"}, "read_file"),
        ("a bare text", "a bare text"),
    ],
)
def test_block_that_is_text_inside_is_served(block: Any, seen: str) -> None:
    """In a message and in a tool result."""
    inside = {"type": "tool_result", "tool_use_id": "a", "content": [block]}

    assert seen == shown({"role": "user", "content": [block]})[0]["content"]
    assert seen == shown({"role": "user", "content": [inside]})[0]["content"]


@pytest.mark.parametrize(
    "block",
    [
        IMAGE,
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}},
        {"type": "document", "source": {"type": "url", "url": "https://files.example/a.pdf"}},
        {"type": "document"},
        {"type": "document", "source": {"type": "content", "content": [IMAGE]}},
        {"type": "container_upload", "file_id": "f"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": {"of": "tomorrow"}},
    ],
    ids=lambda block: str(block["type"]),
)
def test_block_that_is_no_text_is_refused_by_place(block: Any) -> None:
    """Wherever it stands: what the engine does not get is never left out in silence."""
    found = refusal(messages=[{"role": "user", "content": [*text("look"), block]}])
    inside = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    deeper = refusal(messages=[{"role": "user", "content": [inside]}])

    assert ("content_not_served", True) == (found.code, "only text is served" in str(found))
    assert (found.param or "").startswith("messages[0].content[1]")
    assert (deeper.param or "").startswith("messages[0].content[0].content[0]")


def test_tools_are_functions_with_their_schemas() -> None:
    """What only Anthropic's servers read of them is left out."""
    extras = {"strict": True, "defer_loading": True, "cache_control": {}, "type": "custom"}
    found = request(tools=[{**READ, **extras}, {"name": "stop"}], tool_choice={"type": "auto"}).prompt

    assert [
        {
            "type": "function",
            "function": {"name": "read_file", "description": "Reads.", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
    ] == found.tools
    assert "auto" == found.tool_choice


def test_tools_that_a_server_runs_are_left_out_and_named() -> None:
    """Nobody here searches the web; the record says that it was asked for."""
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}

    both, alone = request(tools=[search, READ]), request(tools=[search], tool_choice={"type": "auto"})

    assert ["read_file"] == [tool["function"]["name"] for tool in both.prompt.tools]
    assert {"tools": ["web_search_20250305"]} == both.wishes.overruled == alone.wishes.overruled
    assert (None, None) == (alone.prompt.tools, alone.prompt.tool_choice)


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20250124"])
def test_tool_whose_arguments_nobody_describes_is_refused(kind: str) -> None:
    """The client would run it, but the model is not told how to call it."""
    found = refusal(tools=[READ, {"type": kind, "name": "x"}])

    assert ("tools[1]", True) == (found.param, "input_schema" in str(found))


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "read_file"}, {"type": "function", "function": {"name": "read_file"}}),
    ],
)
def test_tool_choice_is_put_in_the_engine_s_words(choice: Any, read: Any) -> None:
    """All four kinds."""
    assert read == request(tools=[READ], tool_choice=choice).prompt.tool_choice


def test_thinking_that_is_switched_off_reaches_the_template() -> None:
    """Only an explicit wish does, and the template's own argument goes before it."""
    off = {"type": "disabled"}

    assert {} == request().prompt.template_kwargs == request(thinking={"type": "adaptive"}).prompt.template_kwargs
    assert {"enable_thinking": False} == request(thinking=off).prompt.template_kwargs
    given = request(thinking=off, chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert {"enable_thinking": True, "x": 1} == given.prompt.template_kwargs


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"messages": None}, "messages is NoneType"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hi"}, "messages is str"),
        ({"messages": ["hi"]}, "messages[0] has role=None"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0] has role='tool'"),
        ({"messages": [{"role": {}, "content": "x"}]}, "messages[0] has role={}"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is int"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is NoneType"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0] is int"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is NoneType"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id is NoneType",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
            "messages[0].content[0].thinking is NoneType",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
            "messages[0].content[0].input is str",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": "f"}]}]},
            "messages[0].content[0].id is int",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": "{"}]}, "ends with a message of the assistant"),
        ({"system": 3}, "system is int"),
        ({"system": [IMAGE]}, "only text is served"),
        ({"system": [3]}, "system[0] is int"),
        ({"tools": {"a": 1}}, "tools is dict"),
        ({"tools": ["x"]}, "tools[0] is str"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is NoneType"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema is list"),
        ({"tools": [{**READ, "description": 3}]}, "tools[0].description is int"),
        ({"tools": [READ], "tool_choice": "auto"}, "tool_choice is str"),
        ({"tools": [READ], "tool_choice": {"type": "some"}}, "tool_choice.type='some'"),
        ({"tools": [READ], "tool_choice": {"type": []}}, "tool_choice.type=[]"),
        ({"tools": [READ], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name='f'"),
        ({"thinking": "on"}, "thinking is str"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs is list"),
        ({"output_config": "x"}, "output_config is str"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"stop_sequences": [""]}, "stop_sequences=['']"),
        ({"stop_sequences": {"a": 1}}, "stop_sequences="),
        ({"container": "c_1"}, "container is set"),
    ],
)  # fmt: skip
def test_bad_request_says_which_field_is_wrong(values: dict[str, Any], says: str) -> None:
    """A 400 in the protocol's shape that names the field."""
    found = refusal(**values)
    status, body = Messages().error(found)

    assert (400, "invalid_request_error") == (status, json.loads(body)["error"]["type"])
    assert says in json.loads(body)["error"]["message"]
    assert found.param is not None


def test_count_reads_what_a_call_reads() -> None:
    """The same prompt, without what only sampling needs; a conversation that ends with the assistant may be counted."""
    values = {
        "system": text("x-anthropic-billing-header: cch=1;", "You are."),
        "messages": HI,
        "tools": [READ],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    }
    counter = MessagesTokenCount()

    assert request(**values).prompt == counter.parse(Incoming(json.dumps(values).encode()))
    ended = {"messages": [*HI, {"role": "assistant", "content": "so"}]}
    assert 2 == len(counter.parse(Incoming(json.dumps(ended).encode())).messages)
    with pytest.raises(RequestRefused, match="only text is served"):
        counter.parse(Incoming(json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode()))
