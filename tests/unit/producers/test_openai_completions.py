"""OpenAI completions in and out, with the official client's types as the judge of what goes out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from rollstream.producers.dialects.base import End, Incoming, Problem, RequestRefused, Shown
from rollstream.producers.dialects.openai_completions import CompletionExchange, Completions
from rollstream.producers.gateway.refusals import context_overflow
from rollstream.schemas.records import SamplingParams

COMPLETIONS = Completions()
ANSWER = Shown(
    call_id="call-1", created_s=7, model="policy", content="so 😀", reasoning="", end=End.STOP, stop_string=None,
    tool_calls=(), prompt_tokens=9, output_tokens=2,
)  # fmt: skip


def exchange(**values: Any) -> Any:
    return COMPLETIONS.parse(Incoming(json.dumps({"prompt": "hi", **values}).encode()))


def parse(**values: Any) -> Any:
    return exchange(**values).request


def events(body: bytes) -> list[Any]:
    assert body.endswith(b"\n\n")
    return [
        json.loads(line.removeprefix("data: "))
        for line in body.decode().split("\n\n")
        if line and "[DONE]" not in line
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", "hi"),
        (["hi"], "hi"),
        ([1, 10, 11, 2], (1, 10, 11, 2)),
        ([[1, 10, 11, 2]], (1, 10, 11, 2)),
        ([0, 2**32 - 1], (0, 2**32 - 1)),
    ],
)
def test_prompt_is_a_text_or_ids_as_they_stand(prompt: Any, expected: Any) -> None:
    """Ids are not decoded and encoded again; a list of one prompt is that prompt."""
    assert expected == parse(prompt=prompt).prompt


def test_request_keeps_what_is_honoured_and_says_what_is_not() -> None:
    """Sampling parameters as asked, what the server decides apart."""
    request = parse(
        model="m", temperature=0.5, max_tokens=5, seed=3, stop=["x", "y"], stream=True, top_p=0.1, logprobs=2,
        logit_bias={"7": 1}, n=1, best_of=1, echo=False, suffix="", zzz=[1],
    )  # fmt: skip

    sampling = request.wishes.effective(temperature=1.0, max_tokens=100, room_tokens=50)

    assert SamplingParams(0.5, 1.0, -1, 5, 3, ("x", "y")) == sampling
    assert {"top_p": 0.1, "logprobs": 2, "logit_bias": {"7": 1}} == request.wishes.overruled
    assert ("m", True) == (request.model, request.is_stream)


@pytest.mark.parametrize(
    ("values", "param", "says"),
    [
        ({"prompt": None}, "prompt", "NoneType"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": 3}, "prompt", "int"),
        ({"prompt": ["a", "b"]}, "prompt", "2 prompts"),
        ({"prompt": [[1], [2]]}, "prompt", "2 prompts"),
        ({"prompt": [1, "b"]}, "prompt", "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt", "prompt[1]=-1"),
        ({"prompt": [True]}, "prompt", "prompt[0]=True"),
        ({"prompt": [2**32]}, "prompt", "prompt[0]=4294967296"),
        ({"prompt": [[["a"]]]}, "prompt", "prompt[0]"),
        ({"n": 2}, "n", "send the request n times"),
        ({"best_of": 2}, "best_of", "best_of=2"),
        ({"echo": True}, "echo", "echo=True: expected false"),
        ({"suffix": "x"}, "suffix", "suffix"),
        ({"temperature": "hot"}, "temperature", "temperature='hot'"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"stop": [1]}, "stop", "stop=[1]"),
        ({"stream_options": []}, "stream_options", "list"),
    ],
)
def test_bad_request_names_the_field(values: dict[str, Any], param: str, says: str) -> None:
    """A 400 in OpenAI's shape that says what was expected."""
    with pytest.raises(RequestRefused) as refused:
        exchange(**values)

    status, answer = COMPLETIONS.error(refused.value)
    error = json.loads(answer)["error"]
    assert (400, "invalid_request_error", param) == (status, error["type"], error["param"])
    assert says in error["message"]


def test_overflow_has_the_code_that_agents_look_for() -> None:
    """The protocol's own code, as a body and within a stream."""
    status, answer = COMPLETIONS.error(context_overflow(70, 64))
    (streamed,) = events(exchange(stream=True).stream("c", 7, "m").fail(context_overflow(70, 64)))

    assert (400, "context_length_exceeded") == (status, json.loads(answer)["error"]["code"])
    assert json.loads(answer) == streamed


def test_digest_ignores_how_the_answer_is_sent_and_nothing_else() -> None:
    """Text and ids of the same characters are different requests, for the engine gets different ids."""
    same = {
        parse(**more).digest
        for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}, {"user": "u"})
    }
    others = {
        parse(**more).digest
        for more in ({"prompt": "ho"}, {"prompt": [1]}, {"prompt": [[1]]}, {"seed": 1}, {"stop": "x"})
    }

    assert 1 == len(same)
    assert 5 == len(others - same)


@pytest.mark.parametrize(("end", "expected"), [(End.STOP, "stop"), (End.STOP_STRING, "stop"), (End.LENGTH, "length")])
def test_whole_answer_is_what_the_official_client_reads(end: End, expected: str) -> None:
    """Text, end and usage."""
    found = Completion.model_validate_json(exchange().whole(replace(ANSWER, end=end)), strict=True)

    (choice,) = found.choices
    assert ("call-1", "so 😀", expected) == (found.id, choice.text, choice.finish_reason)
    assert {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11} == found.usage.model_dump(
        exclude_none=True
    )  # type: ignore[union-attr]


def test_stream_is_text_then_finish_then_usage_then_done() -> None:
    """In this order; only the chunk that ends it has a finish reason, and only who asks gets usage."""
    stream = exchange(stream=True, stream_options={"include_usage": True}).stream("call-1", 7, "policy")
    alive, body = stream.keep_alive(), stream.end(ANSWER)

    text, finish, usage = events(body)
    assert alive.startswith(b":")
    assert body.endswith(b"data: [DONE]\n\n")
    assert ("so 😀", None) == (text["choices"][0]["text"], text["choices"][0]["finish_reason"])
    assert ("", "stop") == (finish["choices"][0]["text"], finish["choices"][0]["finish_reason"])
    assert ([], {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}) == (
        usage["choices"],
        usage["usage"],
    )
    for chunk in (finish, usage):
        assert "call-1" == Completion.model_validate(chunk, strict=True).id
    assert 2 == len(events(exchange(stream=True).stream("call-1", 7, "policy").end(ANSWER)))


def test_failed_stream_has_no_end() -> None:
    """No finish reason and no `[DONE]`, so that nobody takes it for an answer."""
    refusal = RequestRefused("away", problem=Problem.UNAVAILABLE, code="engine_down")

    body = exchange(stream=True).stream("call-1", 7, "policy").fail(refusal)

    assert b"[DONE]" not in body
    assert [{"error": {"message": "away", "type": "server_error", "param": None, "code": "engine_down"}}] == events(
        body
    )


def test_answer_of_nothing_but_an_end_token_is_an_answer() -> None:
    """Tokens above 0 and no text: a valid sample and no error (vllm#41902)."""
    found = Completion.model_validate_json(exchange().whole(replace(ANSWER, content="", output_tokens=1)))

    assert ("", "stop") == (found.choices[0].text, found.choices[0].finish_reason)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ("prompt", "n", "best_of", "echo", "suffix", "temperature", "max_tokens", "seed", "stop", "stream", "stream_options",
     "logprobs", "logit_bias", "top_p", "model", "user")
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(FIELDS, ANY_JSON, max_size=6) | ANY_JSON)
def test_any_json_is_a_request_or_a_refusal(values: Any) -> None:
    """Nothing that a client can send is an error of the gateway's."""
    try:
        found = COMPLETIONS.parse(Incoming(json.dumps(values).encode()))
    except RequestRefused:
        return

    assert isinstance(found, CompletionExchange)
    assert found.request.prompt
