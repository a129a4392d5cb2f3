"""OpenAI chat completions in and out, with the official client's types as the judge of what goes out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rollstream.producers.dialects.base import End, Incoming, RequestRefused, Shown, ToolCall
from rollstream.producers.dialects.openai_chat import ChatCompletions
from rollstream.producers.gateway.refusals import context_overflow
from rollstream.schemas.records import SamplingParams

CHAT = ChatCompletions()
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c-0", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
ANSWER = Shown(
    call_id="call-1", created_s=7, model="policy", content="so", reasoning="hm", end=End.STOP, stop_string=None,
    tool_calls=(ToolCall("c-0", "f", '{"a":  1}'),), prompt_tokens=9, output_tokens=2,
)  # fmt: skip


def exchange(**values: Any) -> Any:
    return CHAT.parse(Incoming(json.dumps({"messages": HI, **values}).encode()))


def parse(**values: Any) -> Any:
    return exchange(**values).request


def chunks(body: bytes) -> list[ChatCompletionChunk]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert "[DONE]" == lines[-1]
    return [ChatCompletionChunk.model_validate_json(line) for line in lines[:-1]]


def test_request_keeps_what_is_honoured() -> None:
    """Messages and tools as sent, the sampling parameters, what the server decides, and nothing of what is unknown."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = parse(
        model="gpt", tools=tools, temperature=0.5, max_tokens=5, seed=3, stop="x", stream=True, top_p=0.1, zzz=1,
        stream_options={"include_usage": True}, chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip

    sampling = request.wishes.effective(temperature=1.0, max_tokens=100, room_tokens=50)

    assert SamplingParams(0.5, 1.0, -1, 5, 3, ("x",)) == sampling
    assert (HI, tools, {"enable_thinking": False}) == (
        request.prompt.messages, request.prompt.tools, request.prompt.template_kwargs,
    )  # fmt: skip
    assert ("gpt", True, {"top_p": 0.1}) == (request.model, request.is_stream, request.wishes.overruled)


def test_defaults_fill_what_the_client_leaves_out() -> None:
    """The server's temperature and limit, the limit cut to what the context leaves."""
    assert SamplingParams(0.9, 1.0, -1, 20) == parse().wishes.effective(
        temperature=0.9, max_tokens=100, room_tokens=20
    )


def test_text_parts_are_joined_and_arguments_stay_strings() -> None:
    """Content lists of text become text; a tool call's arguments are not touched."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]}]  # fmt: skip

    found = parse(messages=messages).prompt.messages

    assert ("ab", CALL) == (found[0]["content"], found[1]["tool_calls"][0])


def test_digest_ignores_how_the_answer_is_sent() -> None:
    """A retry without `stream` is the same request; another text is not."""
    same = {
        parse(stream=True, stream_options={"include_usage": True}).digest,
        parse().digest,
        parse(stream=False).digest,
    }

    assert 1 == len(same)
    assert parse(messages=[{"role": "user", "content": "ho"}]).digest not in same


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "no JSON"),
        (b"[]", "expected an object"),
        (b"{}", "messages=None"),
        (b'{"messages": []}', "messages=[]"),
        (b'{"messages": ["hi"]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n=2"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "temperature=-1"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens=0"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": "a"}', "seed='a'"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "seed": 9223372036854775808}',
            "seed=9223372036854775808",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "tools"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": {"a": 1}}', "stop="),
    ],
)
def test_bad_request_says_which_field_is_wrong(body: bytes, says: str) -> None:
    """A request that cannot be honoured is a 400 in OpenAI's shape that names the field."""
    with pytest.raises(RequestRefused) as refused:
        CHAT.parse(Incoming(body))

    status, answer = CHAT.error(refused.value)
    error = json.loads(answer)["error"]
    assert (400, "invalid_request_error") == (status, error["type"])
    assert says in error["message"]


def test_overflow_has_the_code_that_agents_look_for() -> None:
    """Codex and others key on it."""
    status, answer = CHAT.error(context_overflow(70, 64))

    error = json.loads(answer)["error"]
    assert 400 == status

    assert "context_length_exceeded" == error["code"]
    assert "maximum context length is 64 tokens" in error["message"]


def test_whole_answer_is_what_the_official_client_reads() -> None:
    """The response object validates, with the arguments as they were sampled."""
    found = ChatCompletion.model_validate_json(exchange().whole(ANSWER))

    assert ("tool_calls", 11) == (found.choices[0].finish_reason, found.usage.total_tokens)  # type: ignore[union-attr]
    assert '{"a":  1}' == found.choices[0].message.tool_calls[0].function.arguments  # type: ignore[index,union-attr]


def test_stream_adds_up_to_the_whole_answer() -> None:
    """Role, deltas, finish, usage: together they say what the response object says."""
    found = chunks(exchange(stream_options={"include_usage": True}).stream("call-1", 7, "policy").end(ANSWER))

    deltas = [chunk.choices[0].delta for chunk in found if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "assistant" == deltas[0].role
    assert "so" == "".join(delta.content or "" for delta in deltas)
    assert ("c-0", "f") == (calls[0].id, calls[0].function.name)  # type: ignore[union-attr]
    assert '{"a":  1}' == "".join(call.function.arguments for call in calls)  # type: ignore[union-attr,misc]
    assert [None, "tool_calls"] == sorted({c.choices[0].finish_reason for c in found if c.choices}, key=bool)
    assert ([], 11) == (found[-1].choices, found[-1].usage.total_tokens)  # type: ignore[union-attr]


@pytest.mark.parametrize(("end", "shown"), [(End.STOP, "tool_calls"), (End.LENGTH, "length")])
def test_cut_answer_is_never_shown_as_tool_calls(end: End, shown: str) -> None:
    """An answer that its limit cut says so, whatever it holds."""
    found = ChatCompletion.model_validate_json(exchange().whole(replace(ANSWER, end=end)))

    assert shown == found.choices[0].finish_reason
