"""The SGLang engine over the scripted SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ProviderError
from rollstream.producers.engines import make_engine
from rollstream.producers.engines.base import Answer, Conversation, LabelSpan
from rollstream.producers.engines.sglang import SglangEngine
from rollstream.schemas.records import LogprobSemantics, SamplingParams
from rollstream.settings import GatewaySettings
from tests.scripted.plays import Play, tool_call
from tests.scripted.sglang import ScriptedSglang

TALK = Conversation([{"role": "user", "content": "What is 2 + 2?"}])
PROMPT = np.array([5, 6, 7], dtype=np.uint32)
PARAMS = SamplingParams(0.7, 1.0, -1, 64, 1, ("x",))


@asynccontextmanager
async def started(server: ScriptedSglang, **settings: Any) -> AsyncIterator[SglangEngine]:
    """The engine of the settings, ready."""
    async with server.served() as url:
        engine = make_engine(GatewaySettings(engine="sglang", engine_url=url, engine_admin_url=url, **settings))
        assert isinstance(engine, SglangEngine)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


async def ask(engine: SglangEngine, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    await engine.generate(PROMPT, PARAMS, "call-1-0", answer)
    return answer


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_answer_is_gathered_from_either_kind_of_stream(is_incremental: bool) -> None:
    """Events that hold everything so far, and events that hold what is new, come to the same ids, each once."""
    server = ScriptedSglang(Play(ids=[9, 8, 7, 6, 5, 2], chunk_tokens=2, spans=[(0, 4, "7"), (4, 6, "8")]))
    server.is_incremental = is_incremental
    async with started(server) as engine:
        answer = await ask(engine)

    assert ([9, 8, 7, 6, 5, 2], [-0.5, -0.501, -0.502, -0.503, -0.504, -0.505]) == (answer.ids, answer.logprobs)
    assert answer.finish is not None
    assert ("stop", 6, (LabelSpan(0, 4, "7"), LabelSpan(4, 6, "8"))) == (
        answer.finish.reason, answer.finish.output_tokens, answer.finish.spans,
    )  # fmt: skip
    assert 8 == engine.version


@pytest.mark.parametrize(("is_raw", "found"), [(False, LogprobSemantics.PROCESSED), (True, LogprobSemantics.RAW)])
async def test_start_finds_out_what_the_server_is(is_raw: bool, found: LogprobSemantics) -> None:
    """Semantics by two temperatures; version, limit, weight label and fingerprint by asking."""
    server = ScriptedSglang()
    server.is_raw, server.label = is_raw, "12"
    async with started(server) as engine:
        identity = engine.identity()

        assert (found, "sglang", "0.5.23", 4096, 12) == (
            identity.semantics, identity.engine, identity.engine_version, identity.max_context_tokens, engine.version,
        )  # fmt: skip
        assert 32 == len(identity.fingerprint)


async def test_every_sampling_field_is_named() -> None:
    """A server's own defaults decide nothing, and the prefix cache stays on."""
    server = ScriptedSglang()
    async with started(server) as engine:
        await ask(engine)

    (asked,) = server.requests
    assert ("call-1-0", [5, 6, 7]) == (asked.request_id, asked.prompt_ids)
    assert {
        "n": 1, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 64, "min_new_tokens": 0,
        "stop": ["x"], "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "sampling_seed": 1,
        "ignore_eos": False, "skip_special_tokens": True,
    } == asked.params  # fmt: skip


async def test_lost_chunk_is_told_by_the_servers_count() -> None:
    """The hard checks compare ids with the count, so the engine hands both on as they are."""
    server = ScriptedSglang(Play(ids=[9, 8, 7, 2], chunk_tokens=2, hidden_chunks=frozenset([0])))
    server.is_incremental = True
    async with started(server) as engine:
        answer = await ask(engine)

    assert answer.finish is not None
    assert ([7, 2], 4) == (answer.ids, answer.finish.output_tokens)


async def test_cut_prompt_is_an_error() -> None:
    """The recorded prompt would not be what the model was conditioned on."""
    server = ScriptedSglang()
    server.prompt_tokens = 2
    async with started(server) as engine:
        with pytest.raises(ProviderError, match="conditioned on 2 tokens, and the prompt has 3"):
            await ask(engine)


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (Play("The input is longer than the model's context length (10 tokens).", status=400), "context_length"),
        (Play("bad stop", status=400), "bad_request"),
        (Play("oops", status=500), "engine_error"),
        (Play("later", status=503), "engine_down"),
        (Play("abcdefgh", chunk_tokens=1, fails_after=1), "engine_error"),
        (Play("abcdefgh", chunk_tokens=1, dies_after=1), "engine_error"),
    ],
)
async def test_failure_has_its_reason_and_keeps_what_came(play: Play, reason: str) -> None:
    """Refused, failed, broke off."""
    answer = Answer()
    async with started(ScriptedSglang(play)) as engine:
        with pytest.raises(ProviderError) as found:
            await ask(engine, answer)

    assert (reason, play.status == 200) == (found.value.reason, bool(answer.ids))


async def test_message_is_parsed_from_the_text() -> None:
    """Tool calls are taken out by our parser, arguments to the character."""
    server = ScriptedSglang(Play(tool_call("f", '{"a":  1}')))
    async with started(server) as engine:
        prompt_ids = await engine.render(TALK)
        answer = Answer()
        await engine.generate(prompt_ids, SamplingParams(1.0, 1.0, -1, 64, None), "call-1-0", answer)
        message = await engine.parse(TALK, answer.ids, prompt_ids, answer.text, "call-1")

    assert [{"name": "f", "arguments": '{"a":  1}'}] == [call["function"] for call in message["tool_calls"]]


async def test_weights_are_changed_after_running_calls_when_the_mode_is_wait() -> None:
    """The label is taken away only when nothing runs, and every label change leaves running requests alone."""
    server = ScriptedSglang(Play("abcdefgh", chunk_tokens=2, waits_after=1))
    async with started(server) as engine:
        running = Answer()
        call = asyncio.create_task(ask(engine, running))
        await server.is_waiting.wait()
        load = asyncio.create_task(engine.load_policy(7, "file:///w/7"))
        for _ in range(3):  # as many round trips as an update that does not wait would need
            await engine.render(TALK)
        before = list(server.posted)
        server.go.set()
        await asyncio.gather(call, load)

    assert [] == before
    assert [
        ("/update_weight_version", {"new_version": "loading-7", "abort_all_requests": False}),
        ("/update_weights_from_disk", {"model_path": "/w/7", "flush_cache": True, "abort_all_requests": False}),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
    ] == server.posted
    assert ("wait", True, 7) == (running.pause_mode, running.cache_cleared, engine.version)
    assert running.finish is not None
    assert {"default"} == {span.label for span in running.finish.spans}


@pytest.mark.parametrize(
    ("mode", "asked", "end", "is_cleared"), [("abort", "abort", "abort", True), ("keep", "in_place", "stop", False)]
)
async def test_running_call_is_told_how_it_was_paused(mode: Any, asked: str, end: str, is_cleared: bool) -> None:
    """Aborted, or frozen and carried on with a cache that other weights filled."""
    server = ScriptedSglang(Play("abcdefgh", chunk_tokens=2, waits_after=1))
    async with started(server, engine_pause_mode=mode) as engine:
        running = Answer()
        call = asyncio.create_task(ask(engine, running))
        await server.is_waiting.wait()
        await engine.load_policy(7, "/w/7")
        server.go.set()
        await call

    assert ("/pause_generation", {"mode": asked}) == server.posted[0]
    assert ("/continue_generation", {}) == server.posted[-1]
    assert running.finish is not None
    assert (mode, is_cleared, end) == (running.pause_mode, running.cache_cleared, running.finish.reason)
