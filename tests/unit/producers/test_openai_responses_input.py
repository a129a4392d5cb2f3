"""Items of the Responses protocol as chat messages: what a model gets to read of what Codex and others send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.producers.dialects.base import Incoming, RequestRefused
from rollstream.producers.dialects.openai_responses import Responses
from rollstream.producers.dialects.openai_responses_thoughts import pack_thought

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
ODD = '{"path":  "caf\\u00e9", "a": 1.0}'


def messages(*items: Any, **values: Any) -> list[dict[str, Any]]:
    body = json.dumps({"input": list(items), **values}).encode()
    return Responses().parse(Incoming(body)).request.prompt.messages  # type: ignore[union-attr]


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def call(call_id: str, name: str = "f", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def result(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def in_chat(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_text_is_a_message_of_the_user() -> None:
    """The shortest form of `input`."""
    assert [{"role": "user", "content": "hi"}] == messages(input="hi")


def test_order_is_the_clients_own() -> None:
    """Codex: instructions, two developer messages, the user; a system message in the middle stays there (ollama#18431)."""
    first, second, late = ({"role": role, "content": role[0]} for role in ("developer", "developer", "system"))

    found = messages(first, second, USER, said("so"), late, USER, instructions="Be brief.")

    assert ["system", "developer", "developer", "user", "assistant", "system", "user"] == [m["role"] for m in found]
    assert ("Be brief.", "s") == (found[0]["content"], found[5]["content"])


def test_parts_are_joined_as_they_are() -> None:
    """Text parts of any kind, a refusal too; nothing stands between them."""
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": " b"},
        {"type": "refusal", "refusal": "c"},
    ]

    assert "a bc" == messages({"role": "user", "content": parts})[0]["content"]


def test_items_of_one_answer_are_one_message() -> None:
    """Thought, text and parallel calls are what the model said at once; the results follow in their order."""
    found = messages(
        USER, thought("hm"), said("I look."), call("c-0", arguments=ODD), call("c-1", "g"), result("c-0", "x"), result("c-1", "y")
    )  # fmt: skip

    assert [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [in_chat("c-0", arguments=ODD), in_chat("c-1", "g")]},
        {"role": "tool", "tool_call_id": "c-0", "content": "x"},
        {"role": "tool", "tool_call_id": "c-1", "content": "y"},
    ] == found  # fmt: skip


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((said("a"), said("b")), ["a", "b"]),
        ((said("a"), thought("t"), said("b")), ["a", "t|b"]),
        ((call("c"), thought("t"), call("d")), ["+c", "t|+d"]),
        ((call("c"), said("b")), ["+c", "b"]),
        ((thought("t"), thought("u"), said("b")), ["t\n\nu|b"]),
        ((said(""), said("b")), ["b"]),
        ((call("c"), result("c", "x"), call("d")), ["+c", "x", "+d"]),
        ((said("a"), {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, call("c")), ["a", "+c"]),
        (({"type": "reasoning", "summary": []}, said("b")), ["b"]),
    ],
)
def test_answer_ends_where_the_next_begins(items: tuple[Any, ...], expected: list[str]) -> None:
    """A thought or a text after text or calls begins another answer; nothing is moved."""

    def short(message: dict[str, Any]) -> str:
        before = f"{message['reasoning_content']}|" if "reasoning_content" in message else ""
        calls = "".join(f"+{one['id']}" for one in message.get("tool_calls", ()))
        return before + message["content"] + calls

    assert expected == [short(message) for message in messages(USER, *items)[1:]]


def test_arguments_and_ids_are_not_touched() -> None:
    """Codex echoes verbatim, so the template gets what was sampled; ids that a client made its own stay its own (exo#2281)."""
    found = messages(USER, call("call1", arguments=ODD), result("call1", "x"), call("", arguments="{half"))

    assert in_chat("call1", arguments=ODD) == found[1]["tool_calls"][0]
    assert "call1" == found[2]["tool_call_id"]
    assert in_chat("", arguments="{half") == found[3]["tool_calls"][0]


def test_namespaced_call_has_the_flat_name() -> None:
    """The name that its tool has in the prompt."""
    found = messages(USER, call("c", "send", namespace="mail"))

    assert "mail__send" == found[1]["tool_calls"][0]["function"]["name"]


def test_custom_call_and_its_result() -> None:
    """The input is the one argument of its function."""
    patch = '*** Begin Patch\n"é"'
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": patch}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "done"}]}

    found = messages(USER, custom, output)

    assert {"input": patch} == json.loads(found[1]["tool_calls"][0]["function"]["arguments"])
    assert {"role": "tool", "tool_call_id": "c", "content": "done"} == found[2]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (thought("hm", encrypted_content=pack_thought("other")), "hm"),
        (
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": pack_thought("hm é😀")},
            "hm é😀",
        ),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}, {"text": "b"}]}, "a\n\nb"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": "rollstream.thought.1.***"}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": "rollstream.thought.1./w=="}, None),
        ({"type": "reasoning", "summary": 3, "content": [3, {"text": 3}], "encrypted_content": 3}, None),
    ],
)
def test_thought_comes_back_whole(item: dict[str, Any], expected: str | None) -> None:
    """From its text, or, as Codex sends it, from what this gateway has packed; what others have encrypted is nobody's to read."""
    found = messages(USER, item, call("c"))

    assert expected == found[1].get("reasoning_content")
    assert "c" == found[1]["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"input": None}, "input is NoneType"),
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": {}}, "input is dict"),
        ({"input": ["hi"]}, "input[0] is str"),
        ({"input": [{}]}, "input[0].type='None'"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type='item_reference'"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "no hosted tool"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "no state is kept"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "nothing that the model could read"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role='robot'"),
        ({"input": [{"role": "user"}]}, "input[0].content is NoneType"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content is int"),
        ({"input": [call("c") | {"name": None}]}, "input[0].name is NoneType"),
        ({"input": [call("c") | {"call_id": 3}]}, "input[0].call_id is int"),
        ({"input": [call("c") | {"arguments": [1]}]}, "input[0].arguments is list"),
        ({"input": [call("c", namespace=3)]}, "input[0].namespace is int"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n"}]}, "input[0].input is NoneType"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id is NoneType"),
        ({"input": [result("c", {"content": "x"})]}, "input[0].output is dict"),
        ({"input": "hi", "instructions": ["x"]}, "instructions is list"),
    ],
)
def test_bad_input_names_the_item(values: dict[str, Any], says: str) -> None:
    """What the model would not see is refused, never dropped."""
    with pytest.raises(RequestRefused) as refused:
        messages(**values)

    assert says in str(refused.value)
    assert refused.value.param


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
@pytest.mark.parametrize("place", ["message", "result"])
def test_what_is_no_text_is_refused(kind: str, place: str) -> None:
    """In a message as in a result, such as that of Codex's `view_image`."""
    part = {"type": kind, "image_url": "data:image/png;base64,AA=="}
    item = {"role": "user", "content": [part]} if place == "message" else result("c", [part])

    with pytest.raises(RequestRefused, match="only text is served") as refused:
        messages(item)

    assert "content_not_served" == refused.value.code
