"""The vLLM engine over recorded answers; over a real server: `tests/end_to_end/test_vllm_call.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation, LabelSpan
from rollstream.producers.engines.http import Answered, EngineGone, EngineHttp
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.schemas.records import LogprobSemantics, SamplingParams
from rollstream.settings import GatewaySettings

TALK = Conversation([{"role": "user", "content": "What is 2 + 2?"}])
PROMPT = [1, 87, 287, 201]
PARAMS = SamplingParams(0.7, 1.0, -1, 4, 1, ("x",))


def item(token: int, logprob: float) -> dict[str, Any]:
    return {
        "token_id": token,
        "logprob": logprob,
        "rank": 1,
        "top_logprobs": [{"token_id": token, "logprob": logprob}],
    }


def event(*ids: int, reason: str | None = None, spans: Any = None, **more: Any) -> dict[str, Any]:
    content = {"content": [item(token, -6.25) for token in ids]}
    choice = {
        "index": 0,
        "finish_reason": reason,
        "token_ids": list(ids),
        "weight_versions": spans,
        "logprobs": content,
    }
    return {"request_id": "generate-tokens-x", "usage": None, "choices": [choice], **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}}
STREAM = [
    event(374, prompt_token_ids=PROMPT),
    event(129),
    event(
        187,
        reason="length",
        spans=[{"version": "default", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}],
    ),
    USAGE,
]


@dataclass
class Reply:
    """What the fake answers: a whole body, or lines."""

    status: int
    json: Any = None
    lines: AsyncIterator[bytes] | None = None

    async def read(self) -> bytes:
        return json.dumps(self.json).encode()


class FakeHttp(EngineHttp):
    """Gives requests to a function instead of a server."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        super().__init__("http://vllm", 1)
        self.answer = answer

    async def get(self, path: str, *, timeout_s: float | None = None) -> Answered:
        return await self.post(path)

    async def post(self, path: str, body: Any = None) -> Answered:
        reply = await self.answer(path.removeprefix("http://vllm"), body)
        return Answered(reply.status, await reply.read())

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        reply = await self.answer(path, body)
        yield FakeStream(reply)


class FakeStream:
    """A reply as the engine reads a stream."""

    def __init__(self, reply: Reply) -> None:
        self.status, self._reply = reply.status, reply

    async def read(self) -> bytes:
        return await self._reply.read()

    async def lines(self) -> AsyncIterator[bytes]:
        assert self._reply.lines is not None
        async for line in self._reply.lines:
            yield line


class FakeVllm:
    """Answers as vLLM 0.32 does; `has_scale_out` False closes its render and generate routes."""

    def __init__(self) -> None:
        self.has_scale_out = True
        self.is_raw = False
        self.stream: list[Any] = STREAM
        self.status = 200
        self.error: dict[str, Any] | None = None
        self.fails_at = ""
        self.requests: list[tuple[str, Any]] = []
        self.label = "default"
        self.is_paused = False
        self.is_cleared = True
        self.prompt = PROMPT

    async def __call__(self, path: str, body: Any) -> Reply:
        path = path.partition("?")[0]
        self.requests.append((path, body))
        if path == self.fails_at:
            return Reply(500, {"error": {"message": "no", "code": 500}})
        if not self.has_scale_out and path.endswith(("render", "/inference/v1/generate")):
            return Reply(403, {"error": {"message": "closed", "code": 403}})
        answers: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 2048}]},
            "/v1/chat/completions/render": {"token_ids": self.prompt},
            "/reset_prefix_cache": {"success": self.is_cleared},
            "/tokenize": {"tokens": PROMPT},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.is_paused},
            "/v1/chat/completions/derender": {"choices": [{"message": self.message(), "finish_reason": "stop"}]},
        }
        if path in answers:
            return Reply(200, answers[path])
        if path in ("/inference/v1/generate", "/v1/completions"):
            return self.sample(path, body)
        return Reply(
            200
            if path in ("/health", "/pause", "/resume", "/collective_rpc") or "weight" in path or "reset" in path
            else 404,
            {},
        )

    def message(self) -> dict[str, Any]:
        call = {"id": "random", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        return {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call], "refusal": None}

    def sample(self, path: str, body: Any) -> Reply:
        if not body["stream"]:
            temperature = body.get("sampling_params", body)["temperature"]
            top = {1: -1.0, 2: -2.0} if self.is_raw or temperature == 1.0 else {1: -0.5, 2: -2.5}
            table = [{"token_id": token, "logprob": value} for token, value in top.items()]
            if path == "/v1/completions":
                logprobs: Any = {"token_logprobs": [-1.0], "top_logprobs": [{str(t): v for t, v in top.items()}]}
            else:
                logprobs = {"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": table}]}
            return Reply(200, {"choices": [{"token_ids": [1], "logprobs": logprobs}]})
        if self.error is not None:
            return Reply(self.status, self.error)

        async def lines() -> AsyncIterator[bytes]:
            for part in self.stream:
                if part is Ellipsis:
                    await asyncio.Event().wait()
                if isinstance(part, Exception):
                    raise part
                yield b"data: " + json.dumps(part).encode()
                yield b""
            yield b"data: [DONE]"

        return Reply(self.status, lines=lines())


@pytest.fixture
def server() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def engine(server: FakeVllm) -> AsyncIterator[VllmEngine]:
    settings = GatewaySettings(engine_url="http://vllm", engine_admin_url="http://vllm", engine_timeout_s=0.5)
    engine = VllmEngine(settings, http=FakeHttp(server))
    yield engine
    await engine.close()


async def ask(engine: VllmEngine) -> Answer:
    answer = Answer()
    await engine.generate(np.array(PROMPT, dtype=np.uint32), PARAMS, "call-1-0", answer)
    return answer


async def test_answer_is_gathered_from_the_stream(engine: VllmEngine, server: FakeVllm) -> None:
    """Ids and log-probabilities of every chunk, the echo of the first, the spans of the last, the count of the usage."""
    await engine.start()

    answer = await ask(engine)

    assert ([374, 129, 187], [-6.25] * 3) == (answer.ids, answer.logprobs)
    assert answer.finish is not None
    assert ("length", PROMPT, 3) == (
        answer.finish.reason,
        answer.finish.prompt_ids.tolist(),
        answer.finish.output_tokens,
    )  # type: ignore[union-attr]
    assert (LabelSpan(0, 2, "default"), LabelSpan(2, 3, "8")) == answer.finish.spans
    assert 8 == engine.version


async def test_every_sampling_field_is_named(engine: VllmEngine, server: FakeVllm) -> None:
    """A server's own defaults decide nothing."""
    await engine.start()
    await ask(engine)

    path, body = server.requests[-1]
    assert ("/inference/v1/generate", "call-1-0", True, PROMPT) == (
        path, body["request_id"], body["return_token_ids"], body["token_ids"],
    )  # fmt: skip
    assert {
        "n": 1, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 4, "seed": 1, "stop": ["x"],
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": 0,
    } == body["sampling_params"]  # fmt: skip


async def test_fallback_samples_from_ids_as_well(engine: VllmEngine, server: FakeVllm) -> None:
    """Without the exact routes: ids from /tokenize, tokens from /v1/completions, and no version unless one is told."""
    server.has_scale_out = False
    choice = {
        "token_ids": [7, 2],
        "text": "ok",
        "prompt_token_ids": PROMPT,
        "logprobs": {"token_logprobs": [-0.5, None]},
    }
    server.stream = [
        {"choices": [choice]},
        {"choices": [{"token_ids": [], "text": "", "finish_reason": "stop"}]},
        USAGE,
    ]
    await engine.start()
    ids = await engine.render(TALK)

    answer = await ask(engine)
    message = await engine.parse(TALK, answer.ids, ids, answer.text, "call-1")

    assert (PROMPT, [7, 2], [-0.5, None], ()) == (ids.tolist(), answer.ids, answer.logprobs, answer.finish.spans)  # type: ignore[union-attr]
    assert {"role": "assistant", "content": "ok"} == message
    assert [PROMPT] == [
        body["prompt"] for path, body in server.requests if path == "/v1/completions" and body["stream"]
    ]


async def test_message_is_the_servers_with_ids_that_a_replay_gives_again(engine: VllmEngine) -> None:
    """Derender makes random ids of tool calls; the record must not depend on them."""
    await engine.start()

    message = await engine.parse(TALK, [7, 2], np.array(PROMPT, dtype=np.uint32), "", "call-1")

    assert {
        "role": "assistant", "content": None, "reasoning_content": "hm",
        "tool_calls": [{"id": "call_call-1-0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    } == message  # fmt: skip


@pytest.mark.parametrize(("is_raw", "found"), [(False, LogprobSemantics.PROCESSED), (True, LogprobSemantics.RAW)])
@pytest.mark.parametrize("has_scale_out", [True, False])
async def test_semantics_are_probed_at_the_start(
    engine: VllmEngine, server: FakeVllm, is_raw: bool, has_scale_out: bool, found: LogprobSemantics
) -> None:
    """No answer tells which distribution is meant, so two temperatures do."""
    server.is_raw, server.has_scale_out = is_raw, has_scale_out

    await engine.start()

    assert (found, 2048, "0.32.0") == (
        engine.identity().semantics, engine.identity().max_context_tokens, engine.identity().engine_version,
    )  # fmt: skip


LONG = "The decoder prompt (length 3000) is longer than the maximum model length of 2048."


@pytest.mark.parametrize(
    ("status", "error", "stream", "reason"),
    [
        (200, None, [{"error": {"message": LONG, "code": 400}}], "context_length"),
        (400, {"error": {"message": LONG, "code": 400}}, [], "context_length"),
        (400, {"error": {"message": "bad stop", "code": 400}}, [], "bad_request"),
        (500, {"error": {"message": "oops", "code": 500}}, [], "engine_error"),
        (200, None, [STREAM[0], {"error": {"message": "oops", "code": 500}}], "engine_error"),
        (200, None, [STREAM[0], EngineGone("reset", reason="engine_error")], "engine_error"),
        (200, None, [STREAM[0]], "engine_error"),
        (200, None, [{"choices": [{"token_ids": 3}]}], "engine_error"),
        (200, None, [STREAM[0], ...], "engine_error"),
    ],
)
async def test_failure_has_its_reason_and_keeps_what_came(
    engine: VllmEngine, server: FakeVllm, status: int, error: Any, stream: list[Any], reason: str
) -> None:
    """Refused, failed, broke off, ended early, answered nonsense, took too long."""
    await engine.start()
    server.status, server.error, server.stream = status, error, stream
    answer = Answer()

    with pytest.raises(ProviderError) as found:
        await engine.generate(np.array(PROMPT, dtype=np.uint32), PARAMS, "call-1-0", answer)

    assert reason == found.value.reason
    assert [374] * (STREAM[0] in stream) == answer.ids


async def test_server_that_is_away_is_engine_down_and_probed_again(engine: VllmEngine, server: FakeVllm) -> None:
    """What comes back may be another server."""
    await engine.start()
    server.requests.clear()
    server.stream = [EngineGone("refused", reason="engine_down")]

    with pytest.raises(ProviderError) as found:
        await ask(engine)
    await engine.start()

    assert ("engine_down", True) == (found.value.reason, "/version" in [path for path, _ in server.requests])


async def test_other_model_than_set_is_an_error_that_says_so(engine: VllmEngine, server: FakeVllm) -> None:
    """The record would name a model that did not sample."""
    engine._model = "other"

    with pytest.raises(ProviderError, match="serves \\['policy'\\], not 'other'"):
        await engine.start()


async def test_weights_are_changed_while_paused(engine: VllmEngine, server: FakeVllm) -> None:
    """Pause, take the label away, reload, clear, label, resume: no token is sampled by half of each."""
    await engine.load_policy(7, "file:///w/7")

    assert [
        ("/pause", None),
        ("/update_weight_version", {"new_version": "loading-7"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w/7"}}),
        ("/reset_prefix_cache", None),
        ("/update_weight_version", {"new_version": "7"}),
        ("/resume", None),
    ] == server.requests


@pytest.mark.parametrize("fails_at", ["/collective_rpc", "/reset_prefix_cache"])
async def test_failed_reload_leaves_a_label_that_is_no_version(
    engine: VllmEngine, server: FakeVllm, fails_at: str
) -> None:
    """The weights may be half of each, so nothing they sample is trainable; the engine goes on."""
    server.fails_at = fails_at

    with pytest.raises(ProviderError):
        await engine.load_policy(7, "/w/7")

    labels = [body["new_version"] for path, body in server.requests if path == "/update_weight_version"]
    assert (["loading-7"], "/resume", None) == (labels, server.requests[-1][0], engine.version)


async def test_weights_are_changed_one_after_the_other(engine: VllmEngine, server: FakeVllm) -> None:
    """Two changes at once would label the weights of one with the version of the other."""

    async def answer_later(path: str, body: Any) -> Reply:
        await asyncio.sleep(0)
        return await server(path, body)

    engine._http = FakeHttp(answer_later)

    await asyncio.gather(engine.load_policy(7, "/w/7"), engine.load_policy(8, "/w/8"))

    assert ["/pause", "/resume", "/pause", "/resume"] == [
        path for path, _ in server.requests if path in ("/pause", "/resume")
    ]
    assert 8 == engine.version


@pytest.mark.parametrize("nonsense", [[], {"choices": []}, {"token_ids": [-1]}, {"token_ids": "x"}])
async def test_nonsense_from_the_server_is_an_engine_error(
    engine: VllmEngine, server: FakeVllm, nonsense: Any
) -> None:
    """Whatever rendering and parsing answer, the call ends with an outcome and the client with an error it knows."""
    await engine.start()

    async def answer(path: str, body: Any) -> Reply:
        return Reply(200, nonsense)

    engine._http = FakeHttp(answer)

    with pytest.raises(ProviderError) as rendered:
        await engine.render(TALK)
    with pytest.raises(ProviderError) as parsed:
        await engine.parse(TALK, [7, 2], np.array(PROMPT, dtype=np.uint32), "", "call-1")

    assert ("engine_error", "engine_error") == (rendered.value.reason, parsed.value.reason)


async def test_calls_wait_while_weights_are_changed(engine: VllmEngine, server: FakeVllm) -> None:
    """A newer vLLM refuses requests while it is paused, so none is sent."""
    await engine.start()
    engine._is_open.clear()
    call = asyncio.create_task(ask(engine))
    await asyncio.sleep(0)
    sent_before = [path for path, body in server.requests if path.endswith("generate") and body["stream"]]
    engine._is_open.set()
    await call

    assert [] == sent_before


@pytest.mark.parametrize(
    ("mode", "is_cleared_before", "reset"),
    [("abort", True, "/reset_prefix_cache"), ("keep", False, "/reset_prefix_cache?reset_running_requests=true")],
)
async def test_running_call_is_told_how_it_was_paused(
    server: FakeVllm, mode: Any, is_cleared_before: bool, reset: str
) -> None:
    """Before the pause, for an aborted call ends in it; a kept one learns at its end whether its cache was cleared."""
    settings = GatewaySettings(engine_url="http://vllm", engine_admin_url="http://vllm", engine_pause_mode=mode)
    engine, running, seen = VllmEngine(settings), Answer(), {}

    async def answer(path: str, body: Any) -> Reply:
        seen[path] = (running.pause_mode, running.cache_cleared)
        return await server(path, body)

    engine._http = FakeHttp(answer)
    engine._sampling[id(running)] = running
    await engine.load_policy(7, "/w/7")

    assert (mode, is_cleared_before) == seen[f"/pause?mode={mode}"] == seen[reset]
    assert (mode, True) == (running.pause_mode, running.cache_cleared)


async def test_cache_that_was_not_cleared_leaves_a_label_that_is_no_version(
    engine: VllmEngine, server: FakeVllm
) -> None:
    """vLLM says so in an answer of 200; new weights over old keys and values would be no version at all."""
    server.is_cleared = False

    with pytest.raises(ProviderError, match="did not clear its prefix cache"):
        await engine.load_policy(7, "/w/7")

    labels = [body["new_version"] for path, body in server.requests if path == "/update_weight_version"]
    assert (["loading-7"], "/resume", None) == (labels, server.requests[-1][0], engine.version)


@pytest.mark.parametrize(("is_paused", "mode"), [(True, "abort"), (False, "")])
async def test_abort_by_somebody_elses_pause_is_known(
    engine: VllmEngine, server: FakeVllm, is_paused: bool, mode: str
) -> None:
    """A trainer that pauses the server by itself ends calls, too."""
    await engine.start()
    server.is_paused, server.stream = is_paused, [event(374, reason="abort"), USAGE]

    assert mode == (await ask(engine)).pause_mode


async def test_version_is_asked_for_around_a_call_without_spans(engine: VllmEngine, server: FakeVllm) -> None:
    """An engine that is silent about versions is asked before and after; weights that moved meanwhile are noticed."""
    server.label, server.stream = "7", [event(374, reason="stop"), USAGE]
    await engine.start()
    before = engine.version
    server.label = "8"
    await ask(engine)

    assert (7, 8) == (before, engine.version)


async def test_version_that_cannot_be_asked_for_is_unknown(engine: VllmEngine, server: FakeVllm) -> None:
    """Neither spans nor the control routes: the record must not say a number."""
    server.fails_at, server.stream = "/weight_info", [event(374, reason="stop"), USAGE]
    await engine.start()
    await ask(engine)

    assert engine.version is None


@pytest.mark.parametrize("change", ["prompt", "message"])
async def test_fingerprint_changes_with_template_and_parsers(server: FakeVllm, change: str) -> None:
    """Equal servers have equal fingerprints; another template or another parser has another."""

    async def found() -> str:
        settings = GatewaySettings(engine_url="http://vllm", engine_admin_url="http://vllm")
        engine = VllmEngine(settings, http=FakeHttp(server))
        await engine.start()
        return engine.identity().fingerprint

    first, again = await found(), await found()
    if change == "prompt":
        server.prompt = [1, 87, 287, 202]
    else:
        server.message = lambda: {"role": "assistant", "content": "raw"}  # type: ignore[method-assign]

    assert (first, True) == (again, first != await found())
