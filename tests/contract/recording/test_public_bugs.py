"""The public bugs of gateway.md §4, by row: what others recorded wrongly, staged against the gateway, and what it records.

The real vLLM client and the real HTTP are in the loop, over a scripted engine with a real tokenizer; where a row needs what that
engine cannot say, over the toy engine. Not here, because the record cannot show it:

* 17 (speculative decoding changes log-probabilities): a fault inside the engine; only an equality test on a real one finds it.
* 21, the engine's half (choices lost with n > 1), needs n > 1, which is never asked for; that it is refused is here.
* 22, SGLang's own stream, is tested with its engine; that only the chosen log-probability counts is here.
* 26 (LiteLLM drops token ids): there is no LiteLLM on the path from engine to record.
* 29 (namespaced tools of Codex): a matter of the Responses dialect, and tested with it.

Of 15 the engine's half (immutable adapter names) and of 30 each protocol's words are tested with engines and protocols; here is
what the record says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollstream.errors import SchemaError
from rollstream.producers.engines.base import LabelSpan
from rollstream.schemas.prompts import common_prefix, decode_prompt, decode_prompts, encode_prompt
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    Delivery,
    LogprobSemantics,
    ModelCall,
    Outcome,
    Record,
    RolloutOpened,
)
from rollstream.schemas.types import unpack_floats, unpack_ids
from rollstream.sinks.audit import audit_evidence
from rollstream.sinks.check_accounted import Quarantine
from rollstream.sinks.stored import Evidence
from tests.contract.protocols.world import World, served_world, until
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play, thought, tool_call
from tests.scripted.tongue import BpeTongue
from tests.services.tiny_qwen import CHAT_TEMPLATE
from tests.unit.producers import fakes
from tests.unit.producers.toy_cases.toy import HI, ToyEngine, calls, output, say

TONGUE = BpeTongue()
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]
Stage = Callable[[Path], Coroutine[Any, Any, None]]
Post = Callable[..., Coroutine[Any, Any, httpx.Response]]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    number: int
    reference: str
    stage: Stage

    def __str__(self) -> str:
        return f"{self.number}-{self.stage.__name__}"


ROWS: list[Row] = []


def row(number: int, reference: str) -> Callable[[Stage], Stage]:
    """Args: reference: one of the public threads."""

    def add(stage: Stage) -> Stage:
        ROWS.append(Row(number, reference, stage))
        return stage

    return add


@pytest.mark.parametrize("one", ROWS, ids=str)
async def test_public_bug(one: Row, tmp_path: Path) -> None:
    """The promise is the row's docstring."""
    await one.stage(tmp_path)


def test_every_row_is_staged_or_said_not_to_be() -> None:
    """All 33, each once."""
    assert sorted([*(one.number for one in ROWS), 17, 26, 29]) == list(range(1, 34))


@asynccontextmanager
async def scene(folder: Path, engine: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[World, Post]]:
    """A rollout, and an HTTP client for it: `post(messages, **values)`."""
    async with (
        served_world(folder, "openai-chat", engine, **settings) as world,
        httpx.AsyncClient(headers={"authorization": f"Bearer {world.api_key}"}, timeout=60) as http,
    ):

        async def post(*messages: dict[str, Any], **values: Any) -> httpx.Response:
            body = {"model": "m", "messages": list(messages), **values}
            return await http.post(f"{world.root_url}/v1/chat/completions", json=body)

        yield world, post
        prompts, failed = decode_prompts(world.calls)
        asked = [request.prompt_ids for request in engine.requests]
        assert ({}, asked) == (failed, [prompts[c.call_id].tolist() for c in world.calls if c.outcome != "rejected"])


def message(answer: httpx.Response) -> dict[str, Any]:
    """What the client would echo."""
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shared(world: World, at: int) -> tuple[int, int]:
    """How many ids a call's prompt shares with the (prompt ‖ output) of the call before; and how many those are."""
    prompts, _ = decode_prompts(world.calls)
    before, call = world.calls[at - 1 : at + 1]
    whole = np.concatenate([prompts[before.call_id], unpack_ids(before.output_ids)])
    found = common_prefix(whole, prompts[call.call_id])
    assert (before.call_id, found) == (call.prompt.base_call_id, call.prompt.base_len)
    return found, len(whole)


def text(call: ModelCall) -> str:
    return str(json.loads(call.message).get("content"))


@row(1, "rllm#272")
async def ids_are_those_that_were_sampled(folder: Path) -> None:
    """Another split than the tokenizer's own stays as it was sampled; the text is only shown."""
    ids = [*TONGUE.bytes_of("The answer is 42."), TONGUE.end_id]
    async with scene(folder, ScriptedEngine(Play(ids=ids), Play())) as (world, post):
        echo = message(await post(user("hi")))
        await post(user("hi"), echo, user("go on"))

        assert ("The answer is 42.", ids) == (echo["content"], output(world.calls[0]))
        assert ids != [*TONGUE.encode("The answer is 42."), TONGUE.end_id]
        found, whole = shared(world, 1)
        assert found < whole


@row(2, "prime-rl#1334")
async def thought_that_the_template_drops_makes_a_sample_of_its_own(folder: Path) -> None:
    """The next prompt has no thought; the earlier sample still has it."""
    async with scene(folder, ScriptedEngine(Play(thought("hm") + "ok"), Play())) as (world, post):
        echo = message(await post(user("hi")))
        await post(user("hi"), echo, user("go on"))

        found, whole = shared(world, 1)
        assert found == world.calls[0].prompt.length < whole
        assert [*TONGUE.encode("<think>hm</think>ok"), TONGUE.end_id] == output(world.calls[0])


@row(3, "renderers#105")
async def empty_thought_of_the_prompt_is_not_in_the_history(folder: Path) -> None:
    """The template opens an answer with an empty thought and shows earlier answers without one: they part right there."""
    opening = "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
    assert CHAT_TEMPLATE.endswith(opening)
    template = CHAT_TEMPLATE.removesuffix(opening) + opening.replace(
        "assistant\\n", "assistant\\n<think>\\n\\n</think>\\n\\n"
    )
    tongue = BpeTongue(template)
    async with scene(folder, ScriptedEngine(Play(), tongue=tongue)) as (world, post):
        echo = message(await post(user("hi")))
        await post(user("hi"), echo, user("go on"))

        wrapper = len(tongue.encode("<think>\n\n</think>\n\n"))
        assert world.calls[0].prompt.length - wrapper == shared(world, 1)[0]


@row(4, "smg#1836")
async def tool_arguments_stay_as_sampled(folder: Path) -> None:
    """Spaces, escapes and order of the sampled JSON; the template prints it otherwise in the next prompt."""
    arguments = '{"path":  "caf\\u00e9", "a": 1}'
    async with scene(folder, ScriptedEngine(Play(tool_call("read_file", arguments)), Play())) as (world, post):
        echo = message(await post(user("hi"), tools=TOOLS))
        (called,) = echo["tool_calls"]
        await post(user("hi"), echo, {"role": "tool", "tool_call_id": called["id"], "content": "1"}, tools=TOOLS)

        first = world.calls[0]
        assert [*TONGUE.encode(tool_call("read_file", arguments)), TONGUE.end_id] == output(first)
        assert arguments == json.loads(first.message)["tool_calls"][0]["function"]["arguments"]
        found, whole = shared(world, 1)
        assert found < whole


@row(5, "vllm#28185")
async def end_token_belongs_to_the_answer(folder: Path) -> None:
    """It is in the ids and not in the text; the newline behind it is the next prompt's. A cut answer has none."""
    async with scene(folder, ScriptedEngine(Play("ok"), Play("one two three"))) as (world, post):
        echo = message(await post(user("hi")))
        cut = await post(user("hi"), echo, user("go on"), max_tokens=2)

        first, second = world.calls
        whole = shared(world, 1)[1]
        prompts, _ = decode_prompts(world.calls)
        assert ("ok", TONGUE.end_id, True) == (echo["content"], output(first)[-1], first.trainable)
        assert (whole, whole) == shared(world, 1)
        assert "\n" == TONGUE.decode(prompts[second.call_id][whole : whole + 1].tolist())
        assert ("length", Outcome.LENGTH, True) == (
            cut.json()["choices"][0]["finish_reason"], second.outcome, second.trainable,
        )  # fmt: skip
        assert TONGUE.encode("one two three")[:2] == output(second)


@row(6, "vllm#27482")
async def chunk_that_was_not_sent_is_found(folder: Path) -> None:
    """The engine's own count says that ids are missing, and so do its spans."""
    play = Play("The answer is 42.", chunk_tokens=2, hidden_chunks=frozenset([1]))
    async with scene(folder, ScriptedEngine(play)) as (world, post):
        await post(user("hi"))

        assert (False, ("token_count_mismatch", "span_gap")) == (world.call.trainable, world.call.defects)


@row(7, "vllm PR#47616")
async def stop_string_keeps_the_ids_that_completed_it(folder: Path) -> None:
    """The text is cut, ids and log-probabilities are not, and both are equally many."""
    async with scene(folder, ScriptedEngine(Play("one END two"))) as (world, post):
        shown = message(await post(user("hi"), stop=["END"]))

        call = world.call
        assert ("one ", Outcome.STOP_STRING, "END", True) == (
            shown["content"], call.outcome, call.stop_reason, call.trainable,
        )  # fmt: skip
        assert "one END" == TONGUE.decode(output(call))
        assert len(output(call)) == len(unpack_floats(call.output_logprobs))


@row(8, "vllm#49040")
async def update_within_a_call_gives_each_token_its_version(folder: Path) -> None:
    """Spans as reported; an engine that says nothing gives no version, whatever its label is before or after."""
    ids = [5, 6, 7, 8, TONGUE.end_id]
    engine = ScriptedEngine(Play(ids=ids, spans=[(0, 3, "7"), (3, 5, "8")]), Play(ids=ids))
    async with scene(folder, engine) as (world, post):
        await post(user("hi"))
        engine.has_spans = False
        await post(user("hi"))

        mixed, silent = world.calls
        assert [(0, 3, 7), (3, 5, 8)] == [(span.start, span.end, span.version) for span in mixed.version_spans]
        assert (True, False, ()) == (mixed.trainable, silent.trainable, silent.version_spans)
        assert silent.defects in (("version_unknown",), ("version_interval",))


@row(9, "NeMo-RL#2962")
async def sentinel_is_no_probability(folder: Path) -> None:
    """It becomes NaN in its place, and the whole call is not trainable."""
    play = Play(ids=[5, 6, TONGUE.end_id], logprobs=[-0.5, -9999.0, None])
    async with scene(folder, ScriptedEngine(play)) as (world, post):
        await post(user("hi"))

        call = world.call
        assert (("logprob_missing", "logprob_sentinel"), False) == (call.defects, call.trainable)
        np.testing.assert_array_equal(np.array([-0.5, np.nan, np.nan], "f4"), unpack_floats(call.output_logprobs))


@row(10, "prime-rl#697")
async def raw_logprobs_are_refused_where_they_are_not_the_sampled_ones(folder: Path) -> None:
    """What the log-probabilities mean is found out and recorded, and so is how it was sampled, whatever was asked for."""
    engine = ScriptedEngine()
    engine.is_raw = True
    async with scene(folder, engine) as (world, post):
        await post(user("hi"), temperature=0.7, top_p=0.9)
        await post(user("hi"), temperature=1.0)

        tempered, plain = world.calls
        assert (LogprobSemantics.RAW, ("semantics_raw",), 0.7, 1.0) == (
            tempered.logprob_semantics, tempered.defects, tempered.sampling.temperature, tempered.sampling.top_p,
        )  # fmt: skip
        assert (True, {"top_p": 0.9}) == (plain.trainable, json.loads(tempered.sampling_requested))
        assert [(1.0, -1, 0.0, 0.0, 1.0)] * 2 == [
            tuple(request.params[name] for name in (
                "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty",
            )) for request in engine.requests
        ]  # fmt: skip


@row(11, "verifiers#1756")
async def retry_is_another_attempt_with_a_request_id_of_its_own(folder: Path) -> None:
    """Failed, and sent again without `stream`: one call."""
    engine = ScriptedEngine(Play("x", fails_after=0), Play())
    async with scene(folder, engine) as (world, post):
        await post(user("hi"), stream=True)
        await post(user("hi"))

        first, second = world.calls
        assert (first.call_id, 0, 1) == (second.call_id, first.call_attempt, second.call_attempt)
        assert [f"{first.call_id}-0", f"{first.call_id}-1"] == [request.request_id for request in engine.requests]


@row(12, "ollama#18431")
async def reminder_stays_where_it_stands(folder: Path) -> None:
    """A system message behind others is not moved to the front, and the next one in its place ends the shared prefix there."""
    system = {"role": "system", "content": "answer"}
    engine = ScriptedEngine()
    async with scene(folder, engine) as (world, post):
        echo = message(await post(system, user("hi"), {"role": "system", "content": "note one"}))
        await post(system, user("hi"), echo, user("go on"), {"role": "system", "content": "note two"})

        first, second = (request.prompt for request in engine.requests)
        assert first.index("answer") < first.index("hi") < first.index("note one")
        assert second.index("hi") < second.index("go on") < second.index("note two")
        found, whole = shared(world, 1)
        assert 0 < found < world.calls[0].prompt.length < whole


@row(13, "miles#2589")
async def abort_for_new_weights_keeps_what_was_sampled(folder: Path) -> None:
    """It is told apart from other aborts, and the client may come again."""

    class Updated(ToyEngine):
        async def generate(self, *arguments: Any) -> None:
            arguments[-1].pause_mode = "abort"
            await super().generate(*arguments)

    engine = Updated(fakes.Play([[10, 11]], reason="abort"))
    async with fakes.started_gateway(folder, engine=engine) as rig:
        answer = await rig.chat(await rig.open())

        (call,) = calls(rig.publisher)
        assert (503, Outcome.ABORTED_POLICY_UPDATE, [10, 11], False, "abort") == (
            answer.status_code, call.outcome, output(call), call.trainable, call.pause_mode,
        )  # fmt: skip


@row(14, "vllm#22197")
async def abort_is_never_shown_as_an_end(folder: Path) -> None:
    """The engine answers 200 with part of the ids."""
    async with scene(folder, ScriptedEngine(Play(ids=[5, 6], reason="abort"))) as (world, post):
        plain = await post(user("hi"))
        streamed = await post(user("hi"), stream=True)

        assert (503, "finish_reason" in streamed.text) == (plain.status_code, False)
        assert [(Outcome.ABORTED, [5, 6], False, 0), (Outcome.ABORTED, [5, 6], False, 1)] == [
            (call.outcome, output(call), call.trainable, call.call_attempt) for call in world.calls
        ]


@row(15, "vllm#42125")
async def adapter_is_recorded_by_name_and_digest(folder: Path) -> None:
    """Two adapters under one name are two in the records."""
    engine = ToyEngine(fakes.Play())
    async with fakes.started_gateway(folder, engine=engine) as rig:
        opened = await rig.open()
        for digest in ("d7", "d8"):
            engine.what = fakes.identity(adapter="policy", adapter_digest=digest)
            await say(rig, opened, HI)

        assert [("policy", "d7"), ("policy", "d8")] == [(c.adapter, c.adapter_digest) for c in calls(rig.publisher)]


@row(16, "vllm PR#42245")
async def logprobs_of_prompts_are_never_asked_for(folder: Path) -> None:
    """With a prefix cache they are stale or empty; what is recorded are those of the sampled ids."""
    engine = ScriptedEngine(Play(ids=[5, TONGUE.end_id]))
    async with scene(folder, engine) as (world, post):
        await post(user("hi"), prompt_logprobs=5)

        assert engine.requests[0].params.get("prompt_logprobs") is None
        assert (2, True) == (len(unpack_floats(world.call.output_logprobs)), world.call.trainable)


@row(18, "NeMo-RL#3390")
async def answer_without_logprobs_is_not_trainable(folder: Path) -> None:
    """They are asked for with a number, and where none come nothing stands in for them."""
    engine = ScriptedEngine(Play(logprobs=()))
    async with scene(folder, engine) as (world, post):
        await post(user("hi"))

        assert (0, False, ("token_count_mismatch",), b"") == (
            engine.requests[0].params["logprobs"], world.call.trainable, world.call.defects, world.call.output_logprobs,
        )  # fmt: skip


@row(19, "vllm PR#34875")
async def half_a_character_is_whole_in_the_ids(folder: Path) -> None:
    """A limit cuts an emoji: the text shows U+FFFD, and the echo of that is another prompt, not another sample."""
    ids = TONGUE.bytes_of("🙂")
    async with scene(folder, ScriptedEngine(Play(ids=ids), Play())) as (world, post):
        echo = message(await post(user("hi"), max_tokens=2))
        await post(user("hi"), echo, user("go on"))

        assert (ids[:2], Outcome.LENGTH, True) == (
            output(world.calls[0]), world.calls[0].outcome, world.calls[0].trainable,
        )  # fmt: skip
        assert "\ufffd" in echo["content"]
        found, whole = shared(world, 1)
        assert found < whole


@row(20, "vllm#47761")
async def tool_call_that_was_cut_is_no_tool_call(folder: Path) -> None:
    """It ends by length, and its echo can be sent."""
    called = tool_call("read_file", '{"path": "notes.txt"}')
    limit = len(TONGUE.encode(called)) - 4
    async with scene(folder, ScriptedEngine(Play(called), Play())) as (world, post):
        answer = await post(user("hi"), tools=TOOLS, max_tokens=limit)
        again = await post(user("hi"), message(answer), user("go on"), tools=TOOLS)

        (choice,) = answer.json()["choices"]
        assert ("length", False, Outcome.LENGTH, True) == (
            choice["finish_reason"], bool(choice["message"].get("tool_calls")), world.calls[0].outcome,
            world.calls[0].trainable,
        )  # fmt: skip
        assert (200, TONGUE.encode(called)[:limit]) == (again.status_code, output(world.calls[0]))


@row(21, "vllm PR#52399")
async def several_choices_are_refused(folder: Path) -> None:
    """One record is one choice; whoever wants n samples asks n times."""
    async with scene(folder, ScriptedEngine()) as (world, post):
        answer = await post(user("hi"), n=2)

        assert (400, "n", [], []) == (
            answer.status_code, answer.json()["error"]["param"], world.engine.requests, world.calls,
        )  # fmt: skip


@row(22, "sglang#39260")
async def only_the_chosen_logprob_counts(folder: Path) -> None:
    """The lists of likeliest tokens repeat those of an earlier chunk, and change nothing."""

    class Repeating(ScriptedEngine):
        def _choice(self, ids: list[int], first: int, play: Play) -> dict[str, Any]:
            choice = super()._choice(ids, first, play)
            for one in choice["logprobs"]["content"]:
                one["top_logprobs"] = [{"token_id": 5, "logprob": -0.25}]
            return choice

    play = Play(ids=[5, 6, 7, TONGUE.end_id], logprobs=[-0.25, -0.5, -0.75, -1.0], chunk_tokens=1)
    async with scene(folder, Repeating(play)) as (world, post):
        await post(user("hi"))

        assert ([-0.25, -0.5, -0.75, -1.0], True) == (
            unpack_floats(world.call.output_logprobs).tolist(), world.call.trainable,
        )  # fmt: skip


@row(23, "vllm#50782")
async def tool_call_ids_may_be_rewritten(folder: Path) -> None:
    """A client changes them on the way back; the prompt is compared by its ids, and the record keeps what was shown."""
    called = tool_call("read_file", '{"path": "notes.txt"}')
    async with scene(folder, ScriptedEngine(Play(called), Play())) as (world, post):
        echo = message(await post(user("hi"), tools=TOOLS))
        shown = echo["tool_calls"][0]["id"]
        echo["tool_calls"][0]["id"] = "call1"
        answer = await post(user("hi"), echo, {"role": "tool", "tool_call_id": "call1", "content": "1"}, tools=TOOLS)

        assert (200, shown) == (answer.status_code, json.loads(world.calls[0].message)["tool_calls"][0]["id"])
        assert shared(world, 1)[0] >= world.calls[0].prompt.length


@row(24, "vllm#25281")
async def special_tokens_are_in_the_ids_only(folder: Path) -> None:
    """What the text leaves out was sampled all the same."""
    (special,) = TONGUE.encode("<|endoftext|>")
    ids = [*TONGUE.encode("one"), special, *TONGUE.encode(" two"), TONGUE.end_id]
    async with scene(folder, ScriptedEngine(Play(ids=ids))) as (world, post):
        shown = message(await post(user("hi")))

        assert ("one two", ids, True) == (shown["content"], output(world.call), world.call.trainable)


@row(25, "vllm#41902")
async def end_token_alone_is_a_sample(folder: Path) -> None:
    """The model says nothing: no error, and one token to train on."""
    async with scene(folder, ScriptedEngine(Play(ids=[TONGUE.end_id]))) as (world, post):
        answer = await post(user("hi"))

        assert ("", 1) == (message(answer)["content"], answer.json()["usage"]["completion_tokens"])
        assert ([TONGUE.end_id], True, Outcome.COMPLETED) == (
            output(world.call), world.call.trainable, world.call.outcome,
        )  # fmt: skip


@row(27, "litellm#8754")
async def client_that_leaves_stops_the_engine(folder: Path) -> None:
    """And what came is kept."""
    engine = ScriptedEngine(Play(ids=[5, 6, 7, TONGUE.end_id], chunk_tokens=2, waits_after=1))
    async with scene(folder, engine) as (world, post):
        call = asyncio.create_task(post(user("hi"), stream=True))
        await engine.is_waiting.wait()
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: world.calls and engine.cancelled)

        assert (Outcome.CLIENT_DISCONNECTED, Delivery.NONE, [5, 6], False) == (
            world.call.outcome, world.call.delivered, output(world.call), world.call.trainable,
        )  # fmt: skip


@row(28, "verifiers#1864")
async def end_is_never_sent_before_its_record_is_in_kafka(folder: Path) -> None:
    """Where Kafka does not acknowledge, the client gets an error that it retries, and the record says that nobody saw it."""
    engine = ScriptedEngine(Play(waits_after=0))
    async with scene(folder, engine, ack_timeout_s=0.3) as (world, post):
        call = asyncio.create_task(post(user("hi")))
        await engine.is_waiting.wait()
        world.publisher.held = True
        engine.go.set()
        answer = await call
        world.publisher.release()

        (correction,) = (record for record in world.publisher.records if isinstance(record, CallDelivery))
        assert (503, "ack_timeout", world.call.call_id, Delivery.NONE) == (
            answer.status_code, answer.json()["error"]["code"], correction.call_id, correction.delivered,
        )  # fmt: skip


@row(30, "claude-code#46348")
async def overflow_is_a_rejected_call(folder: Path) -> None:
    """In the words that agents compact by, recorded, and without asking the engine."""
    engine = ScriptedEngine(max_context_tokens=64)
    async with scene(folder, engine) as (world, post):
        answer = await post(user("long " * 100))

        assert (400, "context_length_exceeded") == (answer.status_code, answer.json()["error"]["code"])
        assert (Outcome.REJECTED, Delivery.NONE, b"", []) == (
            world.call.outcome, world.call.delivered, world.call.output_ids, engine.requests,
        )  # fmt: skip


@row(31, "verl#3960")
async def template_that_clears_earlier_tool_calls_ends_the_prefix(folder: Path) -> None:
    """Two turns share a row while the call is shown; once the user speaks, the prompt has it no more and the sample still has."""
    shows = "message.get('tool_calls') or []"
    assert shows in CHAT_TEMPLATE
    tongue = BpeTongue(
        CHAT_TEMPLATE.replace(shows, "(message.get('tool_calls') if loop.revindex <= 2 else none) or []")
    )
    called = tool_call("read_file", '{"path": "notes.txt"}')
    async with scene(folder, ScriptedEngine(Play(called), Play(), tongue=tongue)) as (world, post):
        echo = message(await post(user("hi"), tools=TOOLS))
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "1"}
        said = message(await post(user("hi"), echo, result, tools=TOOLS))
        await post(user("hi"), echo, result, said, user("go on"), tools=TOOLS)

        first, second, third = world.calls
        assert second.prompt.length > third.prompt.base_len < first.prompt.length + 4
        assert [*tongue.encode(called), tongue.end_id] == output(first)


@row(32, "NeMo-RL#4018")
async def call_over_a_pause_says_how_the_engine_was_paused(folder: Path) -> None:
    """Which weights sampled is in the spans; whose keys and values they saw is in the pause and its cache."""

    class Paused(ToyEngine):
        async def generate(self, *arguments: Any) -> None:
            arguments[-1].pause_mode, arguments[-1].cache_cleared = "keep", False
            await super().generate(*arguments)

    engine = Paused(fakes.Play([[10, 11], [2]], spans=(LabelSpan(0, 2, "7"), LabelSpan(2, 3, "8"))))
    async with fakes.started_gateway(folder, engine=engine) as rig:
        await say(rig, await rig.open(), HI)

        (call,) = calls(rig.publisher)
        assert ("keep", False, [7, 8], True) == (
            call.pause_mode, call.cache_cleared, [span.version for span in call.version_spans], call.trainable,
        )  # fmt: skip


@row(33, "Polar prefix_merging")
async def sampled_ids_cannot_be_put_into_a_later_prompt(folder: Path) -> None:
    """Whoever does it after sampling makes a prompt that nobody was conditioned on: its digest or its intent says so."""
    engine = ToyEngine(fakes.Play([[10, 11, 2]]), fakes.Play())
    async with fakes.started_gateway(folder, engine=engine) as rig:
        opened = await rig.open()
        echo = await say(rig, opened, HI)
        await say(rig, opened, HI, echo, {"role": "user", "content": "b"})
        written = rig.publisher.written

    first, second = (record for _, record in written if isinstance(record, ModelCall))
    prompt = decode_prompts([first, second])[0]
    whole = np.concatenate([prompt[first.call_id], unpack_ids(first.output_ids)])
    swapped = np.array([*whole[:-1], *prompt[second.call_id][10:]], dtype=np.uint32)
    forged = encode_prompt(swapped, {first.call_id: whole})
    assert (12, 9) == (forged.base_len, second.prompt.base_len)

    with pytest.raises(SchemaError, match="digest"):
        decode_prompt(replace(forged, digest=second.prompt.digest), whole)
    assert [] == _differing(written, second)
    assert {"prompt digest", "prompt", "shared prompt", "prompt length"} == set(
        _differing(written, replace(second, prompt=forged))
    )


def _differing(written: Sequence[tuple[str, Record]], last: ModelCall) -> list[str]:
    """What the audit finds to differ between intents and outcomes. Args: last: stands in for the outcome of its call."""
    records = [record for noun, record in written if noun == "calls"]
    evidence = Evidence(
        group_id=last.group_id,
        openings=[record for record in records if isinstance(record, RolloutOpened)],
        starts=[record for record in records if isinstance(record, CallStarted)],
        calls=[
            last if record.call_id == last.call_id else record for record in records if isinstance(record, ModelCall)
        ],
    )
    report = audit_evidence(iter([evidence]), held=Quarantine(), bounds={}, unknown_samples=[], counts={})
    found = [finding for findings in report.findings.values() for finding in findings]
    return [one.message.partition(" is ")[0] for one in found if "in the intent" in one.message]
