"""What every protocol promises, spoken by its official client: the same tests for all, plain and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import CallDelivery, Delivery, Outcome
from rollstream.schemas.types import unpack_floats, unpack_ids
from tests.contract.protocols.speakers import SPEAKERS
from tests.contract.protocols.speakers.base import Failed, Heard, Results, Speaker, Talk, Tool, User, What, Wishes
from tests.contract.protocols.world import World, served_world, until
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play, thought, tool_call

HI = Talk([User("hi")])
READ = Tool("read_file", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

by_stream = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test with a `protocol` runs for each that can do what the test's `needs` name."""
    if "protocol" in metafunc.fixturenames:
        marks = [mark.args for mark in metafunc.definition.iter_markers("needs")]
        needed = {what for names in marks for what in names}
        metafunc.parametrize("protocol", [name for name, speaker in SPEAKERS.items() if needed <= speaker.can])


def needs(*what: What) -> pytest.MarkDecorator:
    return pytest.mark.needs(*what)


async def failure(speaker: Speaker, talk: Talk = HI, *, stream: bool, wishes: Wishes = Wishes()) -> Failed:  # noqa: B008 - frozen
    """The error that a conversation ends with."""
    try:
        heard = await speaker.ask(talk, stream=stream, wishes=wishes)
    except Exception as error:  # noqa: BLE001 - each client has errors of its own; `failed` raises what is none of them
        return speaker.failed(error)
    raise AssertionError(f"expected an error, heard {heard}")


def sampled(world: World, text: str) -> list[int]:
    return [*world.engine.tongue.encode(text), world.engine.tongue.end_id]


@by_stream
async def test_answer_is_heard_and_recorded_exactly(tmp_path: Path, protocol: str, stream: bool) -> None:
    """Text, end, usage and id as the record has them; ids and log-probabilities as the engine gave them."""
    async with served_world(tmp_path, protocol, ScriptedEngine(Play("The answer is 42."))) as world:
        heard = await world.speaker.ask(HI, stream=stream)

        call = world.call
        ids = sampled(world, "The answer is 42.")
        assert ("The answer is 42.", "stop", (), "") == (heard.text, heard.end, heard.calls, heard.thoughts)
        assert (call.call_id, call.prompt.length, len(ids)) == (heard.id, heard.prompt_tokens, heard.output_tokens)
        assert (ids, world.engine.requests[0].prompt_ids) == (
            unpack_ids(call.output_ids).tolist(),
            unpack_ids(call.prompt.suffix).tolist(),
        )
        assert (
            pytest.approx([-0.5 - 0.001 * i for i in range(len(ids))]) == unpack_floats(call.output_logprobs).tolist()
        )
        assert (protocol, Outcome.COMPLETED, True, ()) == (call.protocol, call.outcome, call.trainable, call.defects)


@by_stream
async def test_non_canonical_split_is_kept(tmp_path: Path, protocol: str, stream: bool) -> None:
    """The text is the same, the ids are those that were sampled and not those that its text encodes to."""
    engine = ScriptedEngine()
    ids = [*engine.tongue.bytes_of("answer"), engine.tongue.end_id]  # type: ignore[attr-defined]
    engine.plays = [Play(ids=ids)]
    async with served_world(tmp_path, protocol, engine) as world:
        heard = await world.speaker.ask(HI, stream=stream)

        assert ("answer", ids) == (heard.text, unpack_ids(world.call.output_ids).tolist())
        assert sampled(world, "answer") != ids


@by_stream
async def test_conversation_goes_on_and_each_prompt_is_what_the_engine_got(
    tmp_path: Path, protocol: str, stream: bool
) -> None:
    """An answer goes back as the client gives it, and every prompt comes back from the records alone."""
    async with served_world(tmp_path, protocol, ScriptedEngine(Play("one"), Play("two"), Play("three"))) as world:
        turns: list[Any] = [User("hi")]
        for text in ("one", "two", "three"):
            heard = await world.speaker.ask(Talk(turns), stream=stream)
            assert text == heard.text
            turns += [heard, User(f"after {text}")]

        prompts, failed = decode_prompts(world.calls)
        assert {} == failed
        assert [asked.prompt_ids for asked in world.engine.requests] == [
            prompts[call.call_id].tolist() for call in world.calls
        ]
        assert "one" in world.engine.requests[2].prompt
        assert 3 == len({call.call_id for call in world.calls})


@needs("system")
@by_stream
async def test_system_prompt_stands_first(tmp_path: Path, protocol: str, stream: bool) -> None:
    """Whatever the protocol calls it."""
    async with served_world(tmp_path, protocol) as world:
        await world.speaker.ask(Talk([User("hi")], system="You are terse."), stream=stream)

        assert world.engine.requests[0].prompt.startswith("system\nYou are terse.")


@needs("tools")
@by_stream
async def test_two_tools_at_once_and_their_results(tmp_path: Path, protocol: str, stream: bool) -> None:
    """Both calls arrive with their arguments and ids of their own; both results reach the prompt, in order."""
    reading, adding = tool_call("read_file", '{"path": "a.txt"}'), tool_call("add", '{"a": 1, "b": 2}')
    both = f"I look. {reading}\n{adding}"
    async with served_world(tmp_path, protocol, ScriptedEngine(Play(both), Play("It is 3."))) as world:
        talk = Talk([User("hi")], tools=[READ, ADD])
        first = await world.speaker.ask(talk, stream=stream)
        results = Results([(first.calls[0], "text of a"), (first.calls[1], "three")])
        second = await world.speaker.ask(Talk([User("hi"), first, results], tools=[READ, ADD]), stream=stream)

        assert [("read_file", {"path": "a.txt"}), ("add", {"a": 1, "b": 2})] == [
            (c.name, c.arguments) for c in first.calls
        ]
        assert ("tools", "I look.", 2) == (first.end, first.text.strip(), len({call.id for call in first.calls}))
        assert ("It is 3.", "stop") == (second.text, second.end)
        prompt = world.engine.requests[1].prompt
        assert -1 < prompt.find("text of a") < prompt.find("three")
        assert "read_file" in world.engine.requests[0].prompt
        assert sampled(world, both) == unpack_ids(world.calls[0].output_ids).tolist()
        assert all(call.trainable and call.tools_digest for call in world.calls)


@needs("tools")
@by_stream
async def test_echo_of_a_tool_call_is_what_the_template_makes_of_it(
    tmp_path: Path, protocol: str, stream: bool
) -> None:
    """Odd spacing and escapes stay as sampled in the record; the next prompt is whatever the engine was given."""
    odd = tool_call("read_file", '{"path":  "caf\\u00e9.txt"}')
    async with served_world(tmp_path, protocol, ScriptedEngine(Play(odd), Play("ok"))) as world:
        first = await world.speaker.ask(Talk([User("hi")], tools=[READ]), stream=stream)
        results = Results([(first.calls[0], "x")])
        await world.speaker.ask(Talk([User("hi"), first, results], tools=[READ]), stream=stream)

        assert {"path": "café.txt"} == first.calls[0].arguments
        prompts, _ = decode_prompts(world.calls)
        assert sampled(world, odd) == unpack_ids(world.calls[0].output_ids).tolist()
        assert world.engine.requests[1].prompt_ids == prompts[world.calls[1].call_id].tolist()


@needs("thoughts")
@by_stream
async def test_thought_is_shown_apart_from_the_text(tmp_path: Path, protocol: str, stream: bool) -> None:
    """In the protocol's own way, and it may be sent back."""
    async with served_world(tmp_path, protocol, ScriptedEngine(Play(thought("hm") + "yes"), Play("ok"))) as world:
        first = await world.speaker.ask(HI, stream=stream)
        await world.speaker.ask(Talk([User("hi"), first, User("more")]), stream=stream)

        assert ("hm", "yes") == (first.thoughts, first.text)
        assert 2 == len(world.calls)


@by_stream
async def test_limit_cuts_and_says_so(tmp_path: Path, protocol: str, stream: bool) -> None:
    """No end token is made up; the call is trainable."""
    async with served_world(tmp_path, protocol, ScriptedEngine(Play("The answer is 42."))) as world:
        heard = await world.speaker.ask(HI, stream=stream, wishes=Wishes(max_tokens=3))

        assert ("length", 3) == (heard.end, heard.output_tokens)
        assert sampled(world, "The answer is 42.")[:3] == unpack_ids(world.call.output_ids).tolist()
        assert (Outcome.LENGTH, True) == (world.call.outcome, world.call.trainable)


@needs("tools")
@by_stream
async def test_tool_call_that_the_limit_cuts_is_no_tool_call(tmp_path: Path, protocol: str, stream: bool) -> None:
    """The client is told that the limit cut it; nobody runs half a call."""
    async with served_world(tmp_path, protocol, ScriptedEngine(Play(tool_call("add", '{"a": 1, "b": 2}')))) as world:
        heard = await world.speaker.ask(Talk([User("hi")], tools=[ADD]), stream=stream, wishes=Wishes(max_tokens=8))

        assert ("length", ()) == (heard.end, heard.calls)


@needs("stop")
@by_stream
async def test_stop_string_ends_the_text_and_its_ids_are_kept(tmp_path: Path, protocol: str, stream: bool) -> None:
    """The text is cut before it; the record holds the ids up to the one that completed it."""
    async with served_world(tmp_path, protocol, ScriptedEngine(Play("one two END three"))) as world:
        heard = await world.speaker.ask(HI, stream=stream, wishes=Wishes(stop=["END"]))

        ids = unpack_ids(world.call.output_ids).tolist()
        assert "one two " == heard.text
        assert heard.end in ("stop", "stop_string")
        assert world.engine.tongue.decode(ids).endswith("END")
        assert (Outcome.STOP_STRING, "END", True) == (
            world.call.outcome,
            world.call.stop_reason,
            world.call.trainable,
        )


@by_stream
async def test_sampling_is_what_the_client_asks_and_the_server_allows(
    tmp_path: Path, protocol: str, stream: bool
) -> None:
    """Temperature and limit are honoured; truncation is not, and that it was asked for is recorded."""
    async with served_world(tmp_path, protocol) as world:
        await world.speaker.ask(HI, stream=stream, wishes=Wishes(temperature=0.5, max_tokens=9))

        sampling = world.call.sampling
        assert (0.5, 9, 1.0, -1) == (sampling.temperature, sampling.max_tokens, sampling.top_p, sampling.top_k)
        params = world.engine.requests[0].params
        assert (1.0, -1, 0.0, 1.0) == tuple(params[n] for n in ("top_p", "top_k", "min_p", "repetition_penalty"))


@by_stream
async def test_unknown_fields_pass(tmp_path: Path, protocol: str, stream: bool) -> None:
    """A newer client is served."""
    async with served_world(tmp_path, protocol) as world:
        heard = await world.speaker.ask(HI, stream=stream, wishes=Wishes(unknown={"field_of_tomorrow": {"a": [1]}}))

        assert "ok" == heard.text


@needs("images")
@by_stream
async def test_image_is_refused_by_name(tmp_path: Path, protocol: str, stream: bool) -> None:
    """A clear error, and no call: the engine would not see it."""
    async with served_world(tmp_path, protocol) as world:
        found = await failure(world.speaker, Talk([User("look", image=PIXEL)]), stream=stream)

        assert (400, True) == (found.status, "only text is served" in found.text)
        assert [] == world.calls


@needs("count")
async def test_count_is_what_the_prompt_has(tmp_path: Path, protocol: str) -> None:
    """Rendered like a call, and none is recorded."""
    async with served_world(tmp_path, protocol) as world:
        counted = await world.speaker.count(Talk([User("hi there")], system="Be brief.", tools=[ADD]))
        assert [] == world.calls
        heard = await world.speaker.ask(Talk([User("hi there")], system="Be brief.", tools=[ADD]), stream=False)

        assert counted == heard.prompt_tokens


@by_stream
async def test_overflow_is_an_error_that_agents_recognise(tmp_path: Path, protocol: str, stream: bool) -> None:
    """So that they compact; a rejected call is recorded and the engine is not asked to sample."""
    async with served_world(tmp_path, protocol, ScriptedEngine(max_context_tokens=16)) as world:
        found = await failure(world.speaker, Talk([User("many words " * 40)]), stream=stream)

        assert (400, True) == (found.status, found.is_overflow)
        assert (Outcome.REJECTED, []) == (world.call.outcome, world.engine.requests)


@by_stream
async def test_overflow_that_the_engine_finds_is_the_same_error(tmp_path: Path, protocol: str, stream: bool) -> None:
    """vLLM says it in words of its own, without a code."""
    said = "This model's maximum context length is 16 tokens. However, you requested 40 tokens."
    async with served_world(tmp_path, protocol, ScriptedEngine(Play(said, status=400))) as world:
        found = await failure(world.speaker, stream=stream)

        assert (400, True) == (found.status, found.is_overflow)
        assert Outcome.REJECTED == world.call.outcome


@by_stream
async def test_foreign_key_is_a_401(tmp_path: Path, protocol: str, stream: bool) -> None:
    """In the protocol's own shape, and nothing is recorded."""
    async with served_world(tmp_path, protocol) as world:
        stranger = world.another("sk-of-somebody-else")
        found = await failure(stranger, stream=stream)
        await stranger.close()

        assert (401, []) == (found.status, world.calls)


@by_stream
async def test_too_many_calls_are_a_429_with_a_time_to_come_again(
    tmp_path: Path, protocol: str, stream: bool
) -> None:
    """The one that is being served is not disturbed."""
    engine = ScriptedEngine(Play("ok", waits_after=0))
    async with served_world(tmp_path, protocol, engine, max_calls=1) as world:
        first = asyncio.create_task(world.speaker.ask(HI, stream=False))
        await engine.is_waiting.wait()
        other = world.another()
        found = await failure(other, stream=stream)
        engine.go.set()
        await other.close()

        assert (429, True) == (found.status, (found.retry_after_s or 0) > 0)
        assert "ok" == (await first).text


@by_stream
async def test_kafka_that_owes_too_much_is_a_retryable_error(tmp_path: Path, protocol: str, stream: bool) -> None:
    """Nothing more is taken on, so that memory does not grow."""
    async with served_world(tmp_path, protocol, max_backlog=1, ack_timeout_s=0.05) as world:
        world.publisher.held = True
        for _ in range(2):
            await failure(world.speaker, stream=False)
        asked = len(world.engine.rendered)
        found = await failure(world.speaker, stream=stream)
        world.publisher.release()

        assert found.status in (503, 529)
        assert (found.retry_after_s or 0) > 0
        assert asked == len(world.engine.rendered)


@by_stream
async def test_outcome_that_kafka_does_not_take_is_no_answer(tmp_path: Path, protocol: str, stream: bool) -> None:
    """The client gets a retryable error; its retry is another attempt of the same call."""
    engine = ScriptedEngine(Play("first", waits_after=0), Play("second"))
    async with served_world(tmp_path, protocol, engine, ack_timeout_s=0.2, keep_alive_s=30) as world:
        call = asyncio.create_task(failure(world.speaker, stream=stream))
        await engine.is_waiting.wait()
        world.publisher.held = True
        engine.go.set()
        found = await call
        world.publisher.release()
        heard = await world.speaker.ask(HI, stream=stream)

        first, second = world.calls
        assert found.status in (503, 529)
        assert ("second", second.call_id) == (heard.text, heard.id)
        assert (first.call_id, 0, 1) == (second.call_id, first.call_attempt, second.call_attempt)
        corrections = [record for record in world.publisher.records if isinstance(record, CallDelivery)]
        assert [(first.call_id, 0, Delivery.NONE)] == [(c.call_id, c.call_attempt, c.delivered) for c in corrections]


@by_stream
async def test_engine_that_fails_is_an_error_and_its_tokens_are_kept(
    tmp_path: Path, protocol: str, stream: bool
) -> None:
    """Never a made-up end."""
    engine = ScriptedEngine(Play("The answer is 42.", chunk_tokens=2, fails_after=1))
    async with served_world(tmp_path, protocol, engine) as world:
        found = await failure(world.speaker, stream=stream)

        assert (found.status or 0) >= 500
        assert (Outcome.UPSTREAM_ERROR, False, Delivery.NONE) == (
            world.call.outcome, world.call.trainable, world.call.delivered,
        )  # fmt: skip
        assert sampled(world, "The answer is 42.")[:2] == unpack_ids(world.call.output_ids).tolist()


async def test_engine_that_fails_after_the_stream_has_begun_ends_it_with_an_error(
    tmp_path: Path, protocol: str
) -> None:
    """Signs of life have been sent, so the status is 200; the client still raises."""
    engine = ScriptedEngine(Play("The answer is 42.", waits_after=1, fails_after=1, chunk_tokens=2))
    async with served_world(tmp_path, protocol, engine, keep_alive_s=0.01) as world:
        call = asyncio.create_task(failure(world.speaker, stream=True))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 2)
        engine.go.set()

        await call
        assert Outcome.UPSTREAM_ERROR == world.call.outcome


async def test_slow_answer_is_heard_behind_signs_of_life(tmp_path: Path, protocol: str) -> None:
    """The client skips them."""
    engine = ScriptedEngine(Play("late", waits_after=0))
    async with served_world(tmp_path, protocol, engine, keep_alive_s=0.01) as world:
        call = asyncio.create_task(world.speaker.ask(HI, stream=True))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 2)
        engine.go.set()

        heard = await call
        assert ("late", "stop", world.call.call_id) == (heard.text, heard.end, heard.id)


@by_stream
async def test_abort_for_new_weights_is_an_error_that_is_retried(tmp_path: Path, protocol: str, stream: bool) -> None:
    """The engine answers 200 with part of the ids; the client is told to come again, and the next attempt is whole."""
    engine = ScriptedEngine(Play("The answer", ids=[5, 6], reason="abort"), Play("whole"))
    async with served_world(tmp_path, protocol, engine) as world:
        found = await failure(world.speaker, stream=stream)
        heard = await world.speaker.ask(HI, stream=stream)

        assert found.status in (503, 529)
        assert (Outcome.ABORTED, False, [5, 6]) == (
            world.calls[0].outcome, world.calls[0].trainable, unpack_ids(world.calls[0].output_ids).tolist(),
        )  # fmt: skip
        assert ("whole", 1) == (heard.text, world.calls[1].call_attempt)


@by_stream
async def test_client_that_leaves_cancels_the_engine(tmp_path: Path, protocol: str, stream: bool) -> None:
    """And the ids that had come are kept, not trainable."""
    engine = ScriptedEngine(Play("The answer is 42.", chunk_tokens=2, waits_after=1))
    async with served_world(tmp_path, protocol, engine) as world:
        call = asyncio.create_task(world.speaker.ask(HI, stream=stream))
        await engine.is_waiting.wait()
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: world.calls and engine.cancelled)

        assert (Outcome.CLIENT_DISCONNECTED, Delivery.NONE, False) == (
            world.call.outcome, world.call.delivered, world.call.trainable,
        )  # fmt: skip
        assert sampled(world, "The answer is 42.")[:2] == unpack_ids(world.call.output_ids).tolist()


async def test_equal_requests_at_once_are_samples_of_their_own(tmp_path: Path, protocol: str) -> None:
    """A script that asks twice for two samples gets two calls."""
    engine = ScriptedEngine(Play("ok", waits_after=0))
    async with served_world(tmp_path, protocol, engine) as world:
        both = [asyncio.create_task(world.speaker.ask(HI, stream=at == 0)) for at in range(2)]
        await until(lambda: len(engine.requests) == 2)
        engine.go.set()
        heard: list[Heard] = await asyncio.gather(*both)

        assert 2 == len({call.call_id for call in world.calls}) == len({one.id for one in heard})
        assert {0} == {call.call_attempt for call in world.calls}
        assert 1 == len({call.request_digest for call in world.calls})


async def test_retry_without_stream_is_the_same_request(tmp_path: Path, protocol: str) -> None:
    """Claude Code sends a cut stream again as a plain request: one call, two attempts, and then a new call."""
    engine = ScriptedEngine(Play("x", fails_after=0), Play("ok"))
    async with served_world(tmp_path, protocol, engine) as world:
        await failure(world.speaker, stream=True)
        await world.speaker.ask(HI, stream=False)
        await world.speaker.ask(HI, stream=False)

        first, second, third = world.calls
        assert (first.call_id, 0, 1) == (second.call_id, first.call_attempt, second.call_attempt)
        assert (True, 0) == (third.call_id != first.call_id, third.call_attempt)


def _broken() -> Iterator[bytes]:
    yield from (
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b"[" * 5000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
    )


@pytest.mark.parametrize("body", list(_broken()), ids=lambda body: str(body[:12]))
async def test_body_that_is_no_request_is_a_400(tmp_path: Path, protocol: str, body: bytes) -> None:
    """Never a 500, and nothing is recorded."""
    async with served_world(tmp_path, protocol) as world, httpx.AsyncClient() as http:
        headers = {
            "authorization": f"Bearer {world.api_key}",
            "x-api-key": world.api_key,
            "x-goog-api-key": world.api_key,
        }
        answer = await http.post(world.root_url + world.speaker.path, content=body, headers=headers)

        assert (400, True, []) == (answer.status_code, "error" in answer.json(), world.calls)


async def test_request_that_is_too_large_is_a_413(tmp_path: Path, protocol: str) -> None:
    """Before it is read."""
    async with served_world(tmp_path, protocol, max_request_bytes=300) as world:
        found = await failure(world.speaker, Talk([User("x" * 1000)]), stream=False)

        assert (413, []) == (found.status, world.calls)


async def test_smallest_request_by_hand_is_served(tmp_path: Path, protocol: str) -> None:
    """What the speaker says about path and body holds, so that the tests made by hand mean something."""
    async with served_world(tmp_path, protocol) as world, httpx.AsyncClient() as http:
        headers = {
            "authorization": f"Bearer {world.api_key}",
            "x-api-key": world.api_key,
            "x-goog-api-key": world.api_key,
        }
        answer = await http.post(world.root_url + world.speaker.path, json=dict(world.speaker.body), headers=headers)

        assert (200, 1) == (answer.status_code, len(world.calls))
