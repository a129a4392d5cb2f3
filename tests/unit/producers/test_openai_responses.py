"""OpenAI Responses: the request as a whole, and its answer, with the official client's types and state machine as the judge."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollstream.producers.dialects.base import End, Incoming, Problem, RequestRefused, Shown, ToolCall
from rollstream.producers.dialects.openai_responses import Responses, ResponsesExchange, ResponsesTokenCount
from rollstream.producers.gateway.refusals import context_overflow, unavailable
from rollstream.schemas.records import SamplingParams

RESPONSES = Responses()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SEND = {"type": "function", "name": "send", "parameters": {"type": "object"}, "strict": False}
TOOLS = [
    SEND,
    {"type": "namespace", "name": "mail", "description": "Mail.", "tools": [SEND]},
    {"type": "custom", "name": "apply_patch"},
]
ANSWER = Shown(
    call_id="call-1", created_s=7, model="policy", content="so", reasoning="hm", end=End.STOP, stop_string=None,
    tool_calls=(
        ToolCall("c-0", "send", '{"to":  "caf\\u00e9"}'),
        ToolCall("c-1", "mail__send", "{}"),
        ToolCall("c-2", "apply_patch", '{"input": "*** Begin"}'),
    ),
    prompt_tokens=9, output_tokens=2,
)  # fmt: skip
TEXT = replace(ANSWER, reasoning="", tool_calls=())


def exchange(**values: Any) -> Any:
    return RESPONSES.parse(Incoming(json.dumps({"input": "hi", "tools": TOOLS, **values}).encode()))


def parse(**values: Any) -> Any:
    return exchange(**values).request


def whole(shown: Shown, **values: Any) -> Response:
    return Response.model_validate_json(exchange(**values).whole(shown), strict=True)


def stream(**values: Any) -> Any:
    return exchange(stream=True, **values).stream("call-1", 7, "policy")


def events(body: bytes) -> list[Any]:
    """Each event in the official client's type for it; the event's name is its type."""
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(EVENT.validate_json(data.removeprefix("data: "), strict=True))
        assert f"event: {found[-1].type}" == name
    return found


def kinds(found: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in found]


def test_request_keeps_what_is_honoured_and_says_what_is_not() -> None:
    """As Codex sends it, and more."""
    request = parse(
        model="gpt", temperature=0.5, max_output_tokens=5, stream=True, store=False, top_p=0.1, zzz={"a": [1]},
        tools=[*TOOLS, {"type": "web_search"}], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []},
        parallel_tool_calls=False, reasoning={"effort": "high"}, truncation="auto", chat_template_kwargs={"a": 1},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"], text={"verbosity": "low"},
    )  # fmt: skip

    sampling = request.wishes.effective(temperature=1.0, max_tokens=100, room_tokens=50)

    assert SamplingParams(0.5, 1.0, -1, 5) == sampling
    assert ("gpt", True, "auto", {"a": 1}) == (
        request.model, request.is_stream, request.prompt.tool_choice, request.prompt.template_kwargs,
    )  # fmt: skip
    assert ["send", "mail__send", "apply_patch"] == [tool["function"]["name"] for tool in request.prompt.tools]
    assert {
        "top_p": 0.1, "truncation": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "high"},
        "tools": ["web_search"], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
        "include": ["message.output_text.logprobs"],
    } == request.wishes.overruled  # fmt: skip


def test_plain_request_overrules_nothing() -> None:
    """Values that are as good as none are none; no tools are no list, for an empty one is a 400 in vLLM."""
    request = parse(tools=[], parallel_tool_calls=True, truncation="disabled", reasoning={}, top_p=1, include=[])

    assert ({}, None) == (request.wishes.overruled, request.prompt.tools)


@pytest.mark.parametrize(
    ("values", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": {"id": "c"}}, "conversation", "nothing is kept"),
        ({"prompt": {"id": "p"}}, "prompt", "nothing is kept"),
        ({"background": True}, "background", "nothing is kept"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "'json_schema'"),
        ({"text": {"format": 3}}, "text.format", "expected 'text'"),
        ({"text": "x"}, "text", "text is str"),
        ({"tools": {}}, "tools", "tools is dict"),
        ({"include": "x"}, "include", "include is str"),
        ({"metadata": []}, "metadata", "metadata is list"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "expected bool"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "list"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(values: dict[str, Any], param: str, says: str) -> None:
    """A 400 in OpenAI's shape."""
    with pytest.raises(RequestRefused) as refused:
        exchange(**values)

    status, answer = RESPONSES.error(refused.value)
    error = json.loads(answer)["error"]
    assert (400, "invalid_request_error", param) == (status, error["type"], error["param"])
    assert says in error["message"]


def test_digest_ignores_what_does_not_change_the_answer() -> None:
    """A retry in another form is the same request; another conversation, tool or limit is not."""
    volatile = {"stream": True, "store": False, "metadata": {"a": "b"}, "client_metadata": {"turn": "1"},
                "prompt_cache_key": "k", "user": "u", "service_tier": "flex"}  # fmt: skip
    same = {parse(**{name: value}).digest for name, value in volatile.items()} | {parse().digest}
    others = {
        parse(**more).digest
        for more in (
            {"input": "ho"},
            {"instructions": "x"},
            {"tools": []},
            {"max_output_tokens": 3},
            {"temperature": 0.1},
        )
    }

    assert 1 == len(same)
    assert 5 == len(others - same)


def test_digest_ignores_the_ids_of_items_and_keeps_those_of_calls() -> None:
    """Codex makes item ids up; a call's id may be in the prompt."""
    call = {"type": "function_call", "call_id": "c", "name": "send", "arguments": "{}"}

    same = {parse(input=[{**call, **more}]).digest for more in ({}, {"id": "fc_1"}, {"id": "fc_2"})}

    assert 1 == len(same)
    assert parse(input=[{**call, "call_id": "d"}]).digest not in same


def test_whole_answer_is_what_the_official_client_reads() -> None:
    """Thought, text and each kind of call under the name that the client gave it; arguments as they were sampled."""
    found = whole(ANSWER)

    assert ("call-1", "completed", "so", None) == (
        found.id,
        found.status,
        found.output_text,
        found.incomplete_details,
    )
    assert [
        {"type": "reasoning", "id": "rs_call-1", "summary": [], "status": "completed",
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_call-1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_call-1_0", "call_id": "c-0", "name": "send",
         "arguments": '{"to":  "caf\\u00e9"}', "status": "completed"},
        {"type": "function_call", "id": "fc_call-1_1", "call_id": "c-1", "name": "send", "namespace": "mail",
         "arguments": "{}", "status": "completed"},
        {"type": "custom_tool_call", "id": "ctc_call-1_2", "call_id": "c-2", "name": "apply_patch",
         "input": "*** Begin", "status": "completed"},
    ] == [item.model_dump(exclude_none=True) for item in found.output]  # fmt: skip
    assert (9, 2, 11) == (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens)  # type: ignore[union-attr]


def test_response_repeats_what_was_asked() -> None:
    """Tools and limits as the client sent them."""
    found = whole(TEXT, max_output_tokens=5, temperature=0.5, metadata={"a": "b"}, parallel_tool_calls=False)

    assert (5, 0.5, {"a": "b"}, False, "auto") == (
        found.max_output_tokens, found.temperature, found.metadata, found.parallel_tool_calls, found.tool_choice,
    )  # fmt: skip
    assert ["function", "namespace", "custom"] == [tool.type for tool in found.tools]


def test_codex_gets_its_thought_back_to_the_model() -> None:
    """It drops the text of a reasoning item and keeps `encrypted_content`, which is there for who asks (rosetta loses it)."""
    (item, *_) = json.loads(exchange(include=["reasoning.encrypted_content"]).whole(ANSWER))["output"]
    echo = {"type": "reasoning", "id": item["id"], "summary": [], "content": None,
            "encrypted_content": item["encrypted_content"]}  # fmt: skip

    found = parse(
        input=[{"role": "user", "content": "hi"}, echo, {"role": "assistant", "content": "so"}]
    ).prompt.messages

    assert {"role": "assistant", "content": "so", "reasoning_content": "hm"} == found[1]
    assert json.loads(exchange().whole(ANSWER))["output"][0]["encrypted_content"] is None


def test_echo_of_an_answer_is_one_message_with_flat_names() -> None:
    """What the model said goes back in one piece, custom and namespaced calls by the names that it used."""
    output = json.loads(exchange().whole(ANSWER))["output"]

    (_, found) = parse(input=[{"role": "user", "content": "hi"}, *output]).prompt.messages

    assert ("so", "hm") == (found["content"], found["reasoning_content"])
    assert [(call.id, call.name, json.loads(call.arguments)) for call in ANSWER.tool_calls] == [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in found["tool_calls"]
    ]
    assert ANSWER.tool_calls[0].arguments == found["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("end", [End.STOP, End.STOP_STRING])
def test_answer_of_nothing_but_an_end_token_is_an_answer(end: End) -> None:
    """A message with no text, completed (vllm#41902)."""
    found = whole(replace(TEXT, content="", end=end))

    assert ("completed", "", ["message"]) == (found.status, found.output_text, [item.type for item in found.output])


def test_cut_answer_is_incomplete_and_cut_calls_are_left_out() -> None:
    """A whole call stays; half a call is never something to run (vllm#47761)."""
    half = replace(ANSWER, end=End.LENGTH, tool_calls=(*ANSWER.tool_calls[:1], ToolCall("c-9", "send", '{"to": "ca')))

    found, text = whole(half), whole(replace(TEXT, end=End.LENGTH))

    assert ("incomplete", "max_output_tokens") == (found.status, found.incomplete_details.reason)  # type: ignore[union-attr]
    assert ["reasoning", "message", "function_call"] == [item.type for item in found.output]
    assert [("incomplete", "incomplete")] == [(text.status, item.status) for item in text.output]  # type: ignore[union-attr]
    assert "c-9" not in stream().end(half).decode()
    assert "incomplete" == kinds(events(stream().end(half)))[-1]


def test_events_come_in_the_protocols_order() -> None:
    """gateway.md §3.1, item by item, with one end."""
    found = events(stream().end(ANSWER))

    part = ["output_item.added", "content_part.added"]
    assert [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        *part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ] == kinds(found)  # fmt: skip
    assert [*range(len(found))] == [event.sequence_number for event in found]


def test_events_say_what_the_whole_answer_says() -> None:
    """Items when they are done, and the last event, are the plain response; items begin empty and under the same id."""
    found = events(stream().end(ANSWER))

    output = whole(ANSWER).output
    added = [event.item for event in found if event.type == "response.output_item.added"]
    done = [event for event in found if event.type == "response.output_item.done"]
    assert (output, output, [0, 1, 2, 3, 4]) == (
        [event.item for event in done], found[-1].response.output, [event.output_index for event in done],
    )  # fmt: skip
    assert [item.id for item in output] == [item.id for item in added]
    assert ["in_progress"] * 5 == [item.status for item in added]
    assert ([], [], "", "", "") == (
        added[0].content, added[1].content, added[2].arguments, added[3].arguments, added[4].input,
    )  # fmt: skip
    assert ["hm", "so", '{"to":  "caf\\u00e9"}', "{}", "*** Begin"] == [
        event.delta for event in found if event.type.endswith(".delta")
    ]
    for event in found:
        if hasattr(event, "item_id"):
            assert output[event.output_index].id == event.item_id


def test_official_client_puts_the_stream_together() -> None:
    """Its state machine takes every event, keep-alives among them."""
    alive = stream()
    state = ResponseStreamState(input_tools=omit, text_format=omit)

    for event in events(alive.keep_alive() + alive.keep_alive() + alive.end(ANSWER)):
        state.handle_event(event)

    assert state._completed_response is not None
    assert ("so", 5) == (state._completed_response.output_text, len(state._completed_response.output))


def test_signs_of_life_are_events_and_the_head_comes_once() -> None:
    """Codex counts events and no comments against its idle limit; sequence numbers keep rising."""
    alive = stream()

    found = events(alive.keep_alive() + alive.keep_alive() + alive.keep_alive() + alive.end(TEXT))

    assert ["created", "in_progress", "in_progress", "in_progress", "output_item.added"] == kinds(found)[:5]
    assert [*range(len(found))] == [event.sequence_number for event in found]
    assert 1 == kinds(found).count("created")
    assert {"call-1"} == {event.response.id for event in found if hasattr(event, "response")}


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (context_overflow(70, 64), "context_length_exceeded"),
        (RequestRefused("x", problem=Problem.RATE_LIMITED), "rate_limit_exceeded"),
        (RequestRefused("x"), "invalid_prompt"),
        (RequestRefused("x", problem=Problem.ENGINE_FAILED, code="engine_error"), "server_error"),
        (unavailable("x", code="ack_timeout"), "server_error"),
        (RequestRefused("x", problem=Problem.INTERNAL), "server_error"),
    ],
)
@pytest.mark.parametrize("is_begun", [False, True])
def test_failed_stream_ends_with_failed_and_the_code_that_codex_knows(
    refusal: RequestRefused, code: str, is_begun: bool
) -> None:
    """One failed event, and none of completed or incomplete."""
    failing = stream()
    body = failing.keep_alive() if is_begun else b""
    body += failing.fail(refusal)

    values = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")]
    assert ["response.created", "response.in_progress", "response.failed"] == [value["type"] for value in values]
    assert [0, 1, 2] == [value["sequence_number"] for value in values]
    response = values[-1]["response"]
    assert ("failed", code, str(refusal)) == (
        response["status"],
        response["error"]["code"],
        response["error"]["message"],
    )
    # Of these codes, the official types know all but that of an overflow, which OpenAI's service and Codex have all the same.
    assert 3 == len(events(body.replace(b"context_length_exceeded", b"server_error")))


def test_overflow_before_the_stream_has_the_code_that_agents_look_for() -> None:
    """Codex stops and compacts by it (claude-code#46348, omlx#26)."""
    status, answer = RESPONSES.error(context_overflow(70, 64))

    assert (400, "context_length_exceeded") == (status, json.loads(answer)["error"]["code"])


def test_count_reads_what_a_call_reads() -> None:
    """The same conversation, so that the number is the call's; and it refuses the same."""
    counter = ResponsesTokenCount()
    body = {"input": "hi", "instructions": "Be brief.", "tools": TOOLS}

    assert parse(**body).prompt == counter.parse(Incoming(json.dumps(body).encode()))
    assert {"object": "response.input_tokens", "input_tokens": 7} == json.loads(counter.counted(7))
    with pytest.raises(RequestRefused, match="nothing is kept"):
        counter.parse(Incoming(json.dumps({**body, "previous_response_id": "x"}).encode()))


@pytest.mark.parametrize(
    ("path", "is_mine"),
    [
        ("/v1/responses", True),
        ("/v1/responses/resp_1", True),
        ("/v1/responsesx", False),
        ("/v1/chat/completions", False),
    ],
)
def test_paths_of_the_protocol(path: str, is_mine: bool) -> None:
    """Also those that are not served, so that they get its error."""
    assert is_mine == RESPONSES.is_mine(path, {})


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from(("message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "user",
                       "assistant", "function", "custom", "namespace", "input_text", "refusal", "allowed_tools")),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(("type", "role", "content", "text", "refusal", "name", "namespace", "arguments", "call_id",
                         "output", "input", "summary", "encrypted_content", "tools", "parameters", "format", "mode", "zz")),
        inner, max_size=6,
    ),
    max_leaves=20,
)  # fmt: skip
FIELDS = st.sampled_from(
    ("input", "instructions", "tools", "tool_choice", "include", "text", "metadata", "reasoning", "temperature",
     "max_output_tokens", "parallel_tool_calls", "previous_response_id", "stream", "model", "chat_template_kwargs")
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(FIELDS, ANY_JSON, max_size=6) | ANY_JSON, st.booleans())
def test_any_json_is_a_request_that_can_be_answered_or_a_refusal(values: Any, has_input: bool) -> None:
    """Nothing that a client can send is an error of the gateway's, when it is read or when its answer is written."""
    given_values = {"input": "hi", **values} if has_input and isinstance(values, dict) else values
    try:
        found = RESPONSES.parse(Incoming(json.dumps(given_values).encode()))
    except RequestRefused:
        return

    assert isinstance(found, ResponsesExchange)
    assert found.request.prompt.messages  # type: ignore[union-attr]
    assert "call-1" == json.loads(found.whole(ANSWER))["id"]
    assert found.stream("call-1", 7, "policy").end(ANSWER)
