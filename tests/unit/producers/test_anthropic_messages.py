"""Anthropic Messages in and out, with the official client's types as the judge of what goes out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rollstream.producers.dialects.anthropic_messages import Messages
from rollstream.producers.dialects.base import End, Incoming, Shown, ToolCall
from rollstream.producers.gateway.refusals import context_overflow, unavailable
from rollstream.schemas.records import SamplingParams

HI = [{"role": "user", "content": "hi"}]
ODD = '{"path":  "caf\\u00e9", "n": 123456789012345678901}'
ANSWER = Shown(
    call_id="call-1", created_s=7, model="policy", content="so", reasoning="hm", end=End.STOP, stop_string=None,
    tool_calls=(ToolCall("t-0", "f", ODD), ToolCall("t-1", "g", "")), prompt_tokens=9, output_tokens=2,
)  # fmt: skip
PLAIN = replace(ANSWER, reasoning="", tool_calls=())
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def exchange(**values: Any) -> Any:
    return Messages().parse(Incoming(json.dumps({"max_tokens": 9, "messages": HI, **values}).encode()))


def parse(**values: Any) -> Any:
    return exchange(**values).request


def stream(**values: Any) -> Any:
    return exchange(stream=True, **values).stream("call-1", 7, "policy")


def events(body: bytes) -> list[dict[str, Any]]:
    """Data of each event; its `event:` line says its type."""
    found = []
    for part in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        values = json.loads(data.removeprefix("data: "))
        assert name == f"event: {values['type']}"
        found.append(values)
    return found


def heard(found: list[dict[str, Any]]) -> Message:
    """What the official client puts together; each event validates."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for values in found:
        if values["type"] != "ping":
            event = EVENTS.validate_python(values)
            message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    return Message.model_validate(message.to_dict())


def shape(message: Message) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)


def test_request_keeps_what_is_honoured() -> None:
    """Sampling parameters, and nothing of what is unknown."""
    request = parse(
        model="claude", temperature=0.5, max_tokens=5, stop_sequences=["x", "y"], stream=True, zzz={"a": [1]},
    )  # fmt: skip

    sampling = request.wishes.effective(temperature=1.0, max_tokens=100, room_tokens=50)

    assert SamplingParams(0.5, 1.0, -1, 5, None, ("x", "y")) == sampling
    assert ("claude", True, {}) == (request.model, request.is_stream, request.wishes.overruled)
    assert parse(max_tokens=None).wishes.max_tokens is None


def test_what_is_asked_for_and_does_not_count_is_named() -> None:
    """For the record; no credential is among it."""
    asked = parse(
        top_p=0.9,
        top_k=40,
        thinking={"type": "enabled", "budget_tokens": 2048},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[{"name": "m", "authorization_token": "secret"}],
    ).wishes.overruled

    assert {
        "top_p": 0.9,
        "top_k": 40,
        "thinking.budget_tokens": 2048,
        "tool_choice.disable_parallel_tool_use": True,
        "output_config.effort": "high",
        "output_config.format": {"type": "json_schema", "schema": {}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": "left out",
    } == asked
    assert {} == parse(top_p=1, top_k=-1, thinking={"type": "adaptive"}, context_management={}).wishes.overruled


def billed(nonce: str, **cached: Any) -> list[dict[str, Any]]:
    line = f"x-anthropic-billing-header: cc_version=2.1.197.{nonce}; cc_entrypoint=cli; cch={nonce};"
    return [{"type": "text", "text": line}, {"type": "text", "text": "You are.", **cached}]


def test_digest_ignores_how_the_answer_is_sent() -> None:
    """Claude Code sends a cut stream again without `stream`; its nonce, cache marks and user id may have moved meanwhile."""
    cached = {"cache_control": {"type": "ephemeral"}}
    same = {
        parse(system=billed("0a"), stream=True, metadata={"user_id": "a"}).digest,
        parse(system=billed("0a")).digest,
        parse(system=billed("7f", **cached), service_tier="auto", diagnostics={"previous_message_id": "m"}).digest,
        parse(system=billed("0a"), messages=[{"role": "user", "content": "hi", **cached}]).digest,
    }

    assert 1 == len(same)
    assert parse(system=billed("0a"), messages=[{"role": "user", "content": "ho"}]).digest not in same
    assert parse(system=billed("0a"), tools=[{"name": "f"}]).digest not in same
    assert parse(system=[{"type": "text", "text": "You are not."}]).digest not in same


def test_signature_is_equal_for_a_replay_and_for_no_other_call() -> None:
    """A random one would change the digest of every later request."""
    first, again = exchange().whole(ANSWER), exchange().whole(ANSWER)
    other = exchange().whole(replace(ANSWER, call_id="call-2"))

    signatures = [json.loads(body)["content"][0]["signature"] for body in (first, again, other)]

    assert signatures[0] == signatures[1] != signatures[2]
    assert all(signatures)


def test_whole_answer_is_what_the_official_client_reads() -> None:
    """Thought, text and both tools in order; every sampled token is counted."""
    found = Message.model_validate_json(exchange().whole(ANSWER), strict=True)

    assert ["thinking", "text", "tool_use", "tool_use"] == [block.type for block in found.content]
    assert ("call-1", "policy", "tool_use", None) == (found.id, found.model, found.stop_reason, found.stop_sequence)
    assert (9, 2, 0, 0) == (
        found.usage.input_tokens, found.usage.output_tokens,
        found.usage.cache_read_input_tokens, found.usage.cache_creation_input_tokens,
    )  # fmt: skip


def test_arguments_are_the_very_characters_that_were_sampled() -> None:
    """Spaces, escapes and numbers that no double holds, in an answer and in a stream (gateway.md §4, row 4)."""
    whole = exchange().whole(ANSWER).decode()
    deltas = [e["delta"] for e in events(stream().end(ANSWER)) if e["type"] == "content_block_delta"]

    assert f'"input":{ODD}' in whole
    assert [ODD, "{}"] == [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert {} == json.loads(whole)["content"][3]["input"]


def test_stream_has_the_order_of_the_protocol() -> None:
    """Start, ping, each block from its start to its stop, delta, stop (gateway.md §3.1)."""
    found = events(stream().end(ANSWER))

    assert [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ] == [event["type"] for event in found]  # fmt: skip
    assert [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta",
    ] == [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]  # fmt: skip
    assert [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3] == [event["index"] for event in found if "index" in event]


def test_stream_begins_with_an_empty_message() -> None:
    """No block, no reason, and the prompt's tokens where they are known."""
    start = events(stream().end(ANSWER))[0]["message"]

    assert ("call-1", [], None, None, 9, 0) == (
        start["id"], start["content"], start["stop_reason"], start["stop_sequence"],
        start["usage"]["input_tokens"], start["usage"]["output_tokens"],
    )  # fmt: skip


@pytest.mark.parametrize("beats", [0, 1, 3])
@pytest.mark.parametrize("answer", [ANSWER, PLAIN, replace(PLAIN, content="")], ids=["all", "text", "nothing"])
def test_stream_adds_up_to_the_whole_answer(answer: Shown, beats: int) -> None:
    """Behind any number of signs of life, usage included."""
    began = stream()
    body = b"".join(began.keep_alive() for _ in range(beats)) + began.end(answer)

    found = events(body)

    assert shape(Message.model_validate_json(exchange().whole(answer))) == shape(heard(found))
    assert max(beats, 1) == sum(event["type"] == "ping" for event in found)
    assert 1 == sum(event["type"] == "message_start" for event in found)
    assert ("message_start", "message_stop") == (found[0]["type"], found[-1]["type"])


@pytest.mark.parametrize(
    ("end", "stop_string", "calls", "reason"),
    [
        (End.STOP, None, False, ("end_turn", None)),
        (End.STOP, None, True, ("tool_use", None)),
        (End.LENGTH, None, False, ("max_tokens", None)),
        (End.LENGTH, None, True, ("max_tokens", None)),
        (End.STOP_STRING, "END", False, ("stop_sequence", "END")),
        (End.STOP_STRING, None, False, ("stop_sequence", None)),
    ],
)
def test_end_has_the_protocol_s_word(end: End, stop_string: str | None, calls: bool, reason: Any) -> None:
    """An answer that its limit cut is never shown as one that wants tools (row 20)."""
    answer = replace(ANSWER if calls else PLAIN, end=end, stop_string=stop_string)

    found = Message.model_validate_json(exchange().whole(answer))
    streamed = heard(events(stream().end(answer)))

    assert reason == (found.stop_reason, found.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)


@pytest.mark.parametrize("cut", ['{"path": "a', "[1]", "x", '"x"', "{" * 3000, '{"a": NaN}'])
def test_tool_call_that_is_no_object_is_left_out(cut: str) -> None:
    """Plain and streamed; what is whole stays, and an answer of nothing else ends without tools (row 20)."""
    whole = ToolCall("t-0", "f", "{}")
    answer = replace(ANSWER, tool_calls=(whole, ToolCall("t-1", "f", cut)))
    alone = replace(PLAIN, tool_calls=(ToolCall("t-1", "f", cut),))

    for found in (
        Message.model_validate_json(exchange().whole(answer)),
        heard(events(stream().end(answer))),
    ):
        assert ["t-0"] == [block.id for block in found.content if block.type == "tool_use"]
    assert "end_turn" == Message.model_validate_json(exchange().whole(alone)).stop_reason


def test_answer_without_text_has_an_empty_block() -> None:
    """A sample of one end token is an answer (row 25); clients that read the first block find one."""
    found = Message.model_validate_json(exchange().whole(replace(PLAIN, content="", output_tokens=1)))

    assert [("text", "")] == [(block.type, block.text) for block in found.content if block.type == "text"]
    assert ("end_turn", 1) == (found.stop_reason, found.usage.output_tokens)


def test_tool_call_without_text_has_no_text_block() -> None:
    """It would come back in every later prompt."""
    found = Message.model_validate_json(exchange().whole(replace(ANSWER, content="", reasoning="")))

    assert ["tool_use", "tool_use"] == [block.type for block in found.content]


def test_thought_may_be_hidden_and_keeps_its_signature() -> None:
    """The engine is asked for it all the same; only the client does not see it."""
    hidden = exchange(thinking={"type": "adaptive", "display": "omitted"}, stream=True)

    for found in (
        Message.model_validate_json(hidden.whole(ANSWER)),
        heard(events(hidden.stream("call-1", 7, "policy").end(ANSWER))),
    ):
        block = found.content[0]
        assert block.type == "thinking"
        assert ("", True) == (block.thinking, bool(block.signature))


def test_answer_comes_back_as_it_was_given() -> None:
    """The client's echo is the message again: thought, text, arguments and ids."""
    message = Message.model_validate_json(exchange().whole(ANSWER))
    echo = json.loads(json.dumps({"role": "assistant", "content": [b.model_dump() for b in message.content]}))
    found = parse(messages=[*HI, echo, *HI]).prompt.messages[1]

    assert ("so", "hm") == (found["content"], found["reasoning_content"])
    assert ["t-0", "t-1"] == [call["id"] for call in found["tool_calls"]]
    assert "café" == json.loads(found["tool_calls"][0]["function"]["arguments"])["path"]


def test_failure_within_a_stream_is_its_last_event() -> None:
    """An abort is an error, never a stop (row 14)."""
    began, refusal = stream(), unavailable("paused", code="aborted")
    body = began.keep_alive() + began.keep_alive() + began.fail(refusal)

    found = events(body)

    assert ["message_start", "ping", "ping", "error"] == [event["type"] for event in found]
    assert json.loads(Messages().error(refusal)[1]) == found[-1]
    assert "overloaded_error" == found[-1]["error"]["type"]


def test_overflow_within_a_stream_has_the_same_words() -> None:
    """The engine may find it after signs of life were sent (row 30)."""
    found = events(stream().fail(context_overflow(70, 64)))

    assert ["message_start", "ping", "error"] == [event["type"] for event in found]
    assert "prompt is too long: 70 tokens > 64 maximum" == found[-1]["error"]["message"]


@settings(deadline=None)
@given(
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(st.tuples(st.text(max_size=4), st.text(max_size=8) | st.sampled_from(["{}", ODD])), max_size=3),
    st.sampled_from(list(End)),
    st.integers(0, 2),
)
def test_any_answer_is_the_same_plain_and_streamed(
    content: str, reasoning: str, calls: list[tuple[str, str]], end: End, beats: int
) -> None:
    """Nothing that an engine may say raises, for the record is written by then."""
    tools = tuple(ToolCall(f"t-{index}", name, arguments) for index, (name, arguments) in enumerate(calls))
    answer = replace(ANSWER, content=content, reasoning=reasoning, tool_calls=tools, end=end)
    began = stream()

    body = b"".join(began.keep_alive() for _ in range(beats)) + began.end(answer)

    assert shape(Message.model_validate_json(exchange().whole(answer))) == shape(heard(events(body)))
