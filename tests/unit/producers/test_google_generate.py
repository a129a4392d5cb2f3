"""Google's generateContent in and out, with the official client's types as the judge of what goes out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.producers.dialects.base import End, Exchange, Incoming, Problem, RequestRefused, Shown, ToolCall
from rollstream.producers.dialects.google_contents import tool_choice
from rollstream.producers.dialects.google_generate import GenerateContent
from rollstream.producers.gateway.refusals import context_overflow, unavailable
from rollstream.schemas.records import SamplingParams

GOOGLE = GenerateContent()
HI = {"role": "user", "parts": [{"text": "hi"}]}
ANSWER = Shown(
    call_id="call-1", created_s=7, model="policy", content="so", reasoning="hm", end=End.STOP, stop_string=None,
    tool_calls=(ToolCall("c-0", "f", '{"a":  1}'), ToolCall("c-1", "g", "{}")), prompt_tokens=9, output_tokens=2,
)  # fmt: skip
PLAIN = replace(ANSWER, reasoning="", tool_calls=())
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


def exchange(
    body: dict[str, Any] | None = None,
    *,
    stream: bool = False,
    model: str = "m",
    alt: str | None = "sse",
    **values: Any,
) -> Any:
    content = json.dumps({"contents": [HI], **(body or {}), **values}).encode()
    path = {"streamed_model" if stream else "model": model}
    return GOOGLE.parse(Incoming(content, path=path, query={} if alt is None else {"alt": alt}))


def parse(body: dict[str, Any] | None = None, **values: Any) -> Any:
    return exchange(body, **values).request


def messages(*contents: Any, **values: Any) -> Any:
    return parse(contents=list(contents), **values).prompt.messages


def refused(**values: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        exchange(**values)
    return found.value


def shown_as(shown: Shown, **values: Any) -> types.GenerateContentResponse:
    return types.GenerateContentResponse.model_validate_json(exchange(**values).whole(shown))


def candidate_of(response: types.GenerateContentResponse) -> types.Candidate:
    (candidate,) = response.candidates or ()
    return candidate


def parts_of(response: types.GenerateContentResponse) -> list[types.Part]:
    content = candidate_of(response).content
    assert content is not None
    assert "model" == content.role
    return content.parts or []


def events(body: bytes) -> list[types.GenerateContentResponse]:
    """What a reader of server-sent events takes from a body."""
    lines = body.decode().split("\n")
    return [
        types.GenerateContentResponse.model_validate_json(line.removeprefix("data: "))
        for line in lines
        if line.startswith("data: ")
    ]


def test_request_keeps_what_is_honoured() -> None:
    """Contents, tools and the sampling parameters; what the server decides and what is left out is named."""
    request = parse(
        model="gemini-x",
        systemInstruction={"parts": [{"text": "be "}, {"text": "brief"}]},
        tools=[{"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": {"type": "object"}}]},
               {"googleSearch": {}}],
        generationConfig={"temperature": 0.5, "maxOutputTokens": 5, "seed": 3, "stopSequences": ["x"], "topP": 0.1, "topK": 40,
                          "candidateCount": 1, "presencePenalty": 0, "thinkingConfig": {"thinkingBudget": 9}, "zzz": 1},
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        chatTemplateKwargs={"enable_thinking": False}, zzz={},
    )  # fmt: skip

    sampling = request.wishes.effective(temperature=1.0, max_tokens=100, room_tokens=50)

    assert SamplingParams(0.5, 1.0, -1, 5, 3, ("x",)) == sampling
    assert [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ] == request.prompt.messages
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert [{"type": "function", "function": function}] == request.prompt.tools
    assert {"enable_thinking": False} == request.prompt.template_kwargs
    assert ("gemini-x", False) == (request.model, request.is_stream)
    overruled = {"topP": 0.1, "topK": 40, "thinkingBudget": 9, "tools": ["googleSearch"]}
    assert overruled == request.wishes.overruled


def test_defaults_fill_what_the_client_leaves_out() -> None:
    """The server's temperature and limit, the limit cut to what the context leaves."""
    wishes = parse().wishes

    assert SamplingParams(0.9, 1.0, -1, 20) == wishes.effective(temperature=0.9, max_tokens=100, room_tokens=20)
    assert {} == wishes.overruled


def test_snake_case_is_the_same_request() -> None:
    """Google takes both spellings, and much that is written by hand uses this one."""
    camel = parse(
        systemInstruction={"parts": [{"text": "s"}]}, generationConfig={"maxOutputTokens": 5},
        tools=[{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    )  # fmt: skip
    snake = parse(
        system_instruction={"parts": [{"text": "s"}]}, generation_config={"max_output_tokens": 5},
        tools=[{"function_declarations": [{"name": "f", "parameters_json_schema": {"type": "object"}}]}],
        tool_config={"function_calling_config": {"mode": "any", "allowed_function_names": ["f"]}},
    )  # fmt: skip

    assert (camel.prompt, camel.wishes) == (snake.prompt, snake.wishes)
    assert 1 == parse(generationConfig={"seed": 1}, generation_config={"seed": 2}).wishes.seed


def test_answer_that_is_sent_back_is_one_message() -> None:
    """Thoughts, text and calls apart; the arguments are printed from the object that the client sends, in its order."""
    answer = {"role": "model", "parts": [
        {"text": "hm", "thought": True, "thoughtSignature": "c2ln"}, {"text": "I "}, {"text": "look"},
        {"functionCall": {"id": "c-0", "name": "f", "args": {"b": "café", "a": [1, None]}}, "thoughtSignature": "c2ln"},
        {"functionCall": {"id": "c-1", "name": "g"}},
    ]}  # fmt: skip

    found = messages(HI, answer)[1]

    calls = [("c-0", "f", '{"b":"café","a":[1,null]}'), ("c-1", "g", "{}")]
    assert {
        "role": "assistant", "content": "I look", "reasoning_content": "hm",
        "tool_calls": [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls],
    } == found  # fmt: skip


def test_contents_stay_in_their_order() -> None:
    """Nothing is merged or moved: a system message stands where the client puts it, a response before the text behind it."""
    call = {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "f"}}]}
    result = {"functionResponse": {"id": "c", "name": "f", "response": {"output": "1"}}}
    found = messages(
        HI, call, {"role": "user", "parts": [{"text": "here"}, result, {"text": "and "}, {"text": "now?"}]},
        {"parts": [{"text": "well?"}]},
        {"role": "system", "parts": [{"text": "mind"}]}, {"role": "model", "parts": []},
    )  # fmt: skip

    assert [
        ("user", "hi"), ("assistant", ""), ("user", "here"), ("tool", "1"), ("user", "and now?"),
        ("user", "well?"), ("system", "mind"), ("assistant", ""),
    ] == [(message["role"], message["content"]) for message in found]  # fmt: skip


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "text"}, "text"),
        ({"output": {"a": 1}}, '{"a":1}'),
        ({"error": "no file"}, "Error: no file"),
        ({"error": "Error: no file"}, "Error: no file"),
        ({"result": "text"}, '{"result":"text"}'),
        ({"output": "x", "note": "y"}, '{"output":"x","note":"y"}'),
        ({}, "{}"),
    ],
)
def test_function_response_is_shown_as_google_reads_it(response: dict[str, Any], shown: str) -> None:
    """`output` and `error` have a meaning, everything else is output as it stands; an error is seen as one."""
    content = {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": response}}]}

    assert [{"role": "tool", "name": "f", "content": shown, "tool_call_id": "c"}] == messages(content)


def test_responses_find_their_calls_where_ids_are_missing() -> None:
    """Pi sends none: calls are counted, a response answers the first open call of its name, and ids that are there stay."""

    def call(name: str, call_id: str | None = None) -> dict[str, Any]:
        return {"functionCall": {"name": name, "id": call_id}}

    def result(name: str, call_id: str | None = None) -> dict[str, Any]:
        return {"functionResponse": {"name": name, "id": call_id, "response": {}}}

    found = messages(
        {"role": "model", "parts": [call("f"), call("g"), call("f")]},
        {"role": "user", "parts": [result("g"), result("f"), result("f")]},
        {"role": "model", "parts": [call("f", "mine"), call("f")]},
        {"role": "user", "parts": [result("f", "mine"), result("f"), result("f"), result("f", "other")]},
    )

    assert [["call_0", "call_1", "call_2"], ["mine", "call_4"]] == [
        [one["id"] for one in message["tool_calls"]] for message in found if message["role"] == "assistant"
    ]
    assert ["call_1", "call_0", "call_2", "mine", "call_4", None, "other"] == [
        message.get("tool_call_id") for message in found if message["role"] == "tool"
    ]


def test_empty_parts_are_skipped() -> None:
    """Clients send signatures back in parts of their own; unknown fields of a part that holds something pass."""
    parts = [
        {"thoughtSignature": "c2ln", "thought": True},
        {"text": "x", "fieldOfTomorrow": 1, "inlineData": None},
        {},
    ]

    assert [{"role": "assistant", "content": "x"}] == messages({"role": "model", "parts": parts})


def test_google_schema_becomes_json_schema() -> None:
    """Type names in lower case wherever a schema stands, and nowhere else."""
    schema = {
        "type": "OBJECT", "required": ["type"], "any_of": [{"type": "NULL"}],
        "properties": {"type": {"type": "STRING", "enum": ["OBJECT"], "default": {"type": "STRING"}},
                       "list": {"type": "ARRAY", "items": {"type": "INTEGER"}}},
    }  # fmt: skip

    (tool,) = parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}]).prompt.tools

    assert {
        "type": "object", "required": ["type"], "anyOf": [{"type": "null"}],
        "properties": {"type": {"type": "string", "enum": ["OBJECT"], "default": {"type": "STRING"}},
                       "list": {"type": "array", "items": {"type": "integer"}}},
    } == tool["function"]["parameters"]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "choice", "overruled"),
    [
        ({}, None, []),
        ({"mode": "AUTO"}, None, []),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["f"]}, None, ["f"]),
        ({"mode": "NONE"}, "none", []),
        ({"mode": "ANY"}, "required", []),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, {"type": "function", "function": {"name": "f"}}, []),
        ({"mode": "ANY", "allowedFunctionNames": ["f", "g"]}, "required", ["f", "g"]),
    ],
)
def test_function_calling_mode_is_a_tool_choice(config: dict[str, Any], choice: Any, overruled: list[str]) -> None:
    """What a tool choice cannot say is named as not honoured."""
    assert (choice, overruled) == tool_choice({"toolConfig": {"functionCallingConfig": config}})


def test_digest_is_of_what_is_asked() -> None:
    """The same for stream and plain call and for other labels; another model or text is another request."""
    same = {
        parse().digest,
        parse(stream=True).digest,
        parse(stream=True, alt=None).digest,
        parse(labels={"a": "b"}, store=False).digest,
    }

    assert 1 == len(same)
    others = {parse(model="n").digest, parse(contents=[HI, HI]).digest, parse(generationConfig={"seed": 1}).digest}
    assert 3 == len(others - same)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"contents": None}, "contents=None"),
        ({"contents": []}, "contents=[]"),
        ({"contents": "hi"}, "contents='hi'"),
        ({"contents": ["hi"]}, "contents[0] is str"),
        ({"contents": [{"role": "nobody", "parts": []}]}, "contents[0].role='nobody'"),
        ({"contents": [{"role": {}, "parts": []}]}, "contents[0].role={}"),
        ({"contents": [{"role": ["user"], "parts": []}]}, "contents[0].role=['user']"),
        ({"contents": [{"parts": {}}]}, "contents[0].parts is dict"),
        ({"contents": [{"parts": [3]}]}, "contents[0].parts[0] is int"),
        ({"contents": [{"parts": [{"text": 3}]}]}, "text is int"),
        ({"contents": [{"parts": [{"text": "x", "functionCall": {"name": "f"}}]}]}, "has functionCall and text, expected one"),
        ({"contents": [{"parts": [{"functionCall": {"name": "f"}}]}]}, "only a 'model' content"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {"args": {}}}]}]}, "functionCall is no object with a name"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": "x"}}]}]}, "args is str"),
        ({"contents": [{"parts": [{"functionResponse": {"name": "f", "response": "x"}}]}]}, "response is str"),
        ({"contents": [{"role": "model", "parts": [{"functionResponse": {"name": "f"}}]}]}, "send it as the user's"),
        ({"systemInstruction": 3}, "systemInstruction is int"),
        ({"systemInstruction": {"parts": [{"functionCall": {"name": "f"}}]}}, "systemInstruction has a part that is no text"),
        ({"tools": {}}, "tools is dict"),
        ({"tools": [3]}, "tools[0] is no object"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0]"),
        ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": "x"}]}]}, "parameters that are str"),
        ({"generationConfig": []}, "generationConfig is list"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount=2: expected 1; send the request n times"),
        ({"generationConfig": {"temperature": -1}}, "temperature=-1"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens=0"),
        ({"generationConfig": {"stopSequences": [""]}}, "stopSequences="),
        ({"generationConfig": {"seed": "a"}}, "seed='a'"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "responseModalities=['AUDIO']"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent is not served"),
        ({"continuation_token": "x"}, "continuationToken is not served"),
        ({"stream": True, "alt": "proto"}, "alt='proto'"),
    ],
)  # fmt: skip
def test_bad_request_says_which_field_is_wrong(values: dict[str, Any], says: str) -> None:
    """A request that cannot be honoured is a 400 in Google's shape that names the field."""
    status, answer = GOOGLE.error(refused(**values))

    error = json.loads(answer)["error"]
    assert (400, 400, "INVALID_ARGUMENT") == (status, error["code"], error["status"])
    assert says in error["message"]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"inlineData": {"mimeType": "image/png", "data": ""}}, "'image/png'"),
        ({"inline_data": {"mime_type": "audio/wav", "data": ""}}, "'audio/wav'"),
        ({"text": "see", "fileData": {"fileUri": "gs://x"}}, "'fileData'"),
        ({"executableCode": {"code": "1"}}, "'executableCode'"),
        ({"partOfTomorrow": {}}, "'partOfTomorrow'"),
        ({"functionResponse": {"name": "f", "parts": [{"inlineData": {}}]}}, "'functionResponse.parts'"),
    ],
)
def test_part_that_is_no_text_is_refused_by_name(part: dict[str, Any], kind: str) -> None:
    """It is never dropped: the model would not see what the client believes it sees."""
    refusal = refused(contents=[HI, {"role": "user", "parts": [{"text": "x"}, part]}])

    assert ("content_not_served", True, True) == (
        refusal.code, kind in str(refusal), "only text is served" in str(refusal),
    )  # fmt: skip


def test_overflow_has_the_words_that_agents_look_for() -> None:
    """Google has no code for it; Pi and others match the text."""
    status, answer = GOOGLE.error(context_overflow(70, 64))

    error = json.loads(answer)["error"]
    assert (400, "INVALID_ARGUMENT") == (status, error["status"])
    assert error["message"].startswith("The input token count exceeds the maximum number of tokens allowed")
    assert "64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("problem", "status", "word"),
    [
        (Problem.INVALID, 400, "INVALID_ARGUMENT"),
        (Problem.UNAUTHENTICATED, 401, "UNAUTHENTICATED"),
        (Problem.NOT_FOUND, 404, "NOT_FOUND"),
        (Problem.METHOD, 405, "INVALID_ARGUMENT"),
        (Problem.TOO_LARGE, 413, "INVALID_ARGUMENT"),
        (Problem.RATE_LIMITED, 429, "RESOURCE_EXHAUSTED"),
        (Problem.INTERNAL, 500, "INTERNAL"),
        (Problem.ENGINE_FAILED, 502, "INTERNAL"),
        (Problem.UNAVAILABLE, 503, "UNAVAILABLE"),
    ],
)
def test_every_problem_has_googles_status(problem: Problem, status: int, word: str) -> None:
    """The code in the body is that of the answer, because in a stream there is no other."""
    found, answer = GOOGLE.error(RequestRefused("x", problem=problem))

    assert (status, {"error": {"code": status, "message": "x", "status": word}}) == (found, json.loads(answer))


def test_error_says_when_to_come_again() -> None:
    """And why, as details of Google's kinds."""
    _, answer = GOOGLE.error(unavailable("paused", code="engine_down"))

    details = {one["@type"].rpartition(".")[2]: one for one in json.loads(answer)["error"]["details"]}
    assert ("engine_down", "2s") == (details["ErrorInfo"]["reason"], details["RetryInfo"]["retryDelay"])


def test_whole_answer_is_what_the_official_client_reads() -> None:
    """Thought, text and calls as parts in this order, the call's id, usage, and no word for a tool call as an end."""
    found = shown_as(ANSWER, generationConfig=THOUGHTS)

    parts = parts_of(found)
    assert [("hm", True), ("so", None)] == [(part.text, part.thought) for part in parts[:2]]
    calls = [part.function_call for part in parts[2:]]
    assert [("c-0", "f", {"a": 1}), ("c-1", "g", {})] == [(c.id, c.name, c.args) for c in calls if c]
    assert "so" == found.text
    assert ("call-1", "policy", types.FinishReason.STOP) == (
        found.response_id, found.model_version, candidate_of(found).finish_reason,
    )  # fmt: skip
    usage = found.usage_metadata
    assert usage is not None
    assert (9, 2, 11) == (usage.prompt_token_count, usage.candidates_token_count, usage.total_token_count)


def test_thoughts_are_shown_to_those_who_ask() -> None:
    """A client that does not ask takes the first part for the answer."""
    assert ["so", None, None] == [part.text for part in parts_of(shown_as(ANSWER))]
    assert ["hm", "so", None, None] == [part.text for part in parts_of(shown_as(ANSWER, generationConfig=THOUGHTS))]


def test_signatures_are_equal_for_a_replay_and_survive_an_echo() -> None:
    """On the thought and on the first call behind one; another call has others, and both alphabets of base64 print them equal."""
    answers = [
        json.loads(exchange(generationConfig=THOUGHTS).whole(shown))
        for shown in (ANSWER, ANSWER, replace(ANSWER, call_id="x"))
    ]

    first, again, other = (
        [part.get("thoughtSignature") for part in answer["candidates"][0]["content"]["parts"]] for answer in answers
    )
    assert first == again
    assert [True, False, True, False] == [bool(signature) for signature in first]
    assert 4 == len({*first, *other} - {None})
    assert all(signature.isalnum() and len(signature) % 4 == 0 for signature in first if signature)
    assert [] == [part for part in parts_of(shown_as(replace(ANSWER, reasoning=""))) if part.thought_signature]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (End.STOP, types.FinishReason.STOP),
        (End.STOP_STRING, types.FinishReason.STOP),
        (End.LENGTH, types.FinishReason.MAX_TOKENS),
    ],
)
def test_end_is_shown_as_it_was(end: End, reason: types.FinishReason) -> None:
    """An answer that its limit cut says so, whatever it holds."""
    assert reason == candidate_of(shown_as(replace(ANSWER, end=end))).finish_reason


@pytest.mark.parametrize("arguments", ['{"a": "x', "[1]", '"x"', "nonsense", '{"a": NaN}'])
def test_call_without_an_object_is_no_call(arguments: str) -> None:
    """Cut by the limit it is left out; written wrong by the model it has Google's word for that, and is told in full."""
    calls = (ToolCall("c-0", "f", arguments), ToolCall("c-1", "g", '{"b": 2}'))
    cut = shown_as(replace(PLAIN, tool_calls=calls, end=End.LENGTH))
    wrong = shown_as(replace(PLAIN, tool_calls=calls))

    for found in (cut, wrong):
        assert [None, "g"] == [part.function_call and part.function_call.name for part in parts_of(found)]
    assert types.FinishReason.MAX_TOKENS == candidate_of(cut).finish_reason
    assert types.FinishReason.MALFORMED_FUNCTION_CALL == candidate_of(wrong).finish_reason
    assert f"f({arguments})" in (candidate_of(wrong).finish_message or "")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":  1}',
        '{\n  "a": 1\r\n}',
        '{"a": 123456789012345678901234567890}',
        '{"a": "\\u00e9"}',
        "",
        '{"a":' * 300 + "1" + "}" * 300,
    ],
)
def test_arguments_are_written_as_they_were_sampled(arguments: str) -> None:
    """Spacing, large numbers, escapes and depth stay; a line end, which would break an event in two, is a space."""
    shown = replace(PLAIN, tool_calls=(ToolCall("c", "f", arguments),))
    written = arguments.replace("\r", " ").replace("\n", " ") or "{}"

    assert f'"args":{written}}}'.encode() in exchange().whole(shown)
    body = exchange(stream=True).stream("call-1", 7, "policy").end(shown)
    assert (1, b"\n\n") == (len(body.splitlines()) - 1, body[-2:])
    assert json.loads(written) == json.loads(body[6:])["candidates"][0]["content"]["parts"][1]["functionCall"]["args"]


def test_answer_of_nothing_is_an_answer() -> None:
    """A model that ends at once has said something: an empty text, which the client's chat keeps."""
    found = shown_as(replace(PLAIN, content=""))

    assert ("", types.FinishReason.STOP) == (found.text, candidate_of(found).finish_reason)


def test_stream_is_one_event_that_says_what_the_whole_answer_says() -> None:
    """Parts, then in the same response the end and usage; nothing behind it, for this protocol has no sentinel."""
    asked = exchange(stream=True, generationConfig=THOUGHTS)
    stream = asked.stream("call-1", 7, "policy")

    body = stream.keep_alive() + stream.end(ANSWER)

    assert [types.GenerateContentResponse.model_validate_json(asked.whole(ANSWER))] == events(body)
    assert ("text/event-stream", b"\n\n") == (stream.media_type.partition(";")[0], body[-2:])


def test_signs_of_life_in_events_are_blank_lines() -> None:
    """Comments would be more usual, and are an error to google-genai for Python and for Go."""
    stream = exchange(stream=True).stream("call-1", 7, "policy")

    assert (b"\n\n", b"\n\n") == (stream.keep_alive(), stream.keep_alive())


def test_stream_without_alt_is_one_array() -> None:
    """With space in it for as long as it takes, or without."""
    for beats in (0, 3):
        stream = exchange(stream=True, alt=None).stream("call-1", 7, "policy")
        body = b"".join(stream.keep_alive() for _ in range(beats)) + stream.end(ANSWER)
        (found,) = json.loads(body)

        assert json.loads(exchange().whole(ANSWER)) == found
        assert "application/json" == stream.media_type.partition(";")[0]


@pytest.mark.parametrize("beats", [0, 2])
@pytest.mark.parametrize("alt", ["sse", "json"])
def test_error_in_a_stream_is_no_end(alt: str, beats: int) -> None:
    """The error object with its code, and no finish reason; as an event it stands alone, without `data:`."""
    stream = exchange(stream=True, alt=alt).stream("call-1", 7, "policy")

    body = b"".join(stream.keep_alive() for _ in range(beats)) + stream.fail(unavailable("aborted", code="aborted"))

    found = json.loads(body)
    error = found["error"] if alt == "sse" else found[0]["error"]
    assert (503, "UNAVAILABLE", "aborted") == (error["code"], error["status"], error["message"])
    assert b"finishReason" not in body


def test_client_is_known_by_its_header_or_path() -> None:
    """So that a path that is not there gets Google's error, and `/v1/models` Google's list."""
    key = {b"x-goog-api-key": b"k"}

    assert [True, True, False] == [
        GOOGLE.is_mine("/v1/models", key), GOOGLE.is_mine("/v1beta/files", {}), GOOGLE.is_mine("/v1/models", {}),
    ]  # fmt: skip


NAMES = st.sampled_from((
    "contents", "parts", "role", "text", "functionCall", "function_call", "functionResponse", "name", "id", "args", "response",
    "output", "error", "tools", "functionDeclarations", "parameters", "type", "properties", "items", "systemInstruction",
    "generationConfig", "generation_config", "thinkingConfig", "includeThoughts", "stopSequences", "temperature", "seed",
    "toolConfig", "functionCallingConfig", "mode", "allowedFunctionNames", "inlineData", "thought", "responseModalities", "_",
))  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(("user", "model", "ANY", "OBJECT", "TEXT")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)


def _answered(body: bytes) -> None:
    """Either an exchange that can answer, or a refusal that can be written."""
    for path in ({"model": "m"}, {"streamed_model": "m"}):
        try:
            found: Exchange = GOOGLE.parse(Incoming(body, path=path))
        except RequestRefused as refusal:
            status, answer = GOOGLE.error(refusal)
            assert 400 == status == json.loads(answer)["error"]["code"]
        else:
            types.GenerateContentResponse.model_validate_json(found.whole(ANSWER))


@settings(max_examples=300, deadline=None)
@given(OBJECTS)
def test_any_object_is_an_exchange_or_a_refusal(values: dict[str, Any]) -> None:
    """Never another exception, whatever stands where."""
    _answered(json.dumps(values).encode())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=3), OBJECTS)
def test_any_parts_are_an_exchange_or_a_refusal(parts: list[Any], config: dict[str, Any]) -> None:
    """The same, deeper within a request that is otherwise right."""
    for role in ("user", "model"):
        body = {
            "contents": [{"role": role, "parts": parts}],
            "generationConfig": config,
            "tools": [{"functionDeclarations": parts}],
        }
        _answered(json.dumps(body).encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_refused(body: bytes) -> None:
    """A body that is no request is a 400."""
    with pytest.raises(RequestRefused):
        GOOGLE.parse(Incoming(body, path={"model": "m"}))
