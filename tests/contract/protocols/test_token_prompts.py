"""Completions with token ids, which is how a loop of one's own samples: ids in, the same ids in the record.

Source: gateway.md §4 of the design notes, rows 1, 19 and 26.
"""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import Outcome
from rollstream.schemas.types import unpack_ids
from tests.contract.protocols.world import World, served_world
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play
from tests.scripted.tongue import BpeTongue

TONGUE = BpeTongue()
PROMPT = TONGUE.render([{"role": "user", "content": "hi"}])


def client(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.root_url}/v1", api_key=world.api_key, max_retries=0)


async def test_ids_are_the_prompt_and_are_never_encoded_again(tmp_path: Path) -> None:
    """What was sampled in another split than its text encodes to stays in that split in the next prompt (rllm#272)."""
    sampled, end = TONGUE.bytes_of("answer"), TONGUE.end_id
    engine = ScriptedEngine(Play(ids=[*sampled, end]), Play("ok"))
    async with served_world(tmp_path, "openai-completions", engine) as world, client(world) as own:
        asked_at_start = len(engine.rendered), len(engine.posted)
        first = await own.completions.create(model="m", prompt=PROMPT)
        longer = [*PROMPT, *sampled, end, *TONGUE.encode("\n"), *PROMPT]
        second = await own.completions.create(model="m", prompt=[longer])

        assert ("answer", "ok") == (first.choices[0].text, second.choices[0].text)
        assert [PROMPT, longer] == [asked.prompt_ids for asked in engine.requests]
        assert TONGUE.encode("answer") != sampled
        assert {"/detokenize"} == {path for path, _ in engine.posted[asked_at_start[1] :]}
        assert asked_at_start[0] == len(engine.rendered)
        assert [*sampled, end] == unpack_ids(world.calls[0].output_ids).tolist()
        prompts, failed = decode_prompts(world.calls)
        assert {} == failed
        assert [PROMPT, longer] == [prompts[call.call_id].tolist() for call in world.calls]
        base = world.calls[1].prompt
        assert (world.calls[0].call_id, len(PROMPT) + len(sampled) + 1) == (base.base_call_id, base.base_len)
        assert all(call.trainable for call in world.calls)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_half_a_character_is_shown_and_its_ids_are_kept(tmp_path: Path, stream: bool) -> None:
    """A limit cuts 😀 after two of its four tokens: the text has U+FFFD, the record the ids (ollama#13497)."""
    ids = TONGUE.bytes_of("a😀")
    engine = ScriptedEngine(Play(ids=[*ids, TONGUE.end_id]))
    async with served_world(tmp_path, "openai-completions", engine) as world, client(world) as own:
        if stream:
            chunks = await own.completions.create(model="m", prompt=PROMPT, max_tokens=3, stream=True)
            text = "".join([choice.text async for chunk in chunks for choice in chunk.choices])
        else:
            text = (await own.completions.create(model="m", prompt=PROMPT, max_tokens=3)).choices[0].text

        assert "a\ufffd" == text
        assert (ids[:3], Outcome.LENGTH, True) == (
            unpack_ids(world.call.output_ids).tolist(), world.call.outcome, world.call.trainable,
        )  # fmt: skip


async def test_several_samples_are_several_requests(tmp_path: Path) -> None:
    """`n`, or more prompts than one, would be choices without a record each (vllm PR#52399): refused, and nothing is sampled."""
    async with served_world(tmp_path, "openai-completions", ScriptedEngine()) as world, client(world) as own:
        for values in ({"prompt": PROMPT, "n": 2}, {"prompt": [PROMPT, PROMPT]}, {"prompt": ["a", "b"]}):
            with pytest.raises(openai.BadRequestError):
                await own.completions.create(model="m", **values)  # type: ignore[call-overload]

        assert ([], []) == (world.calls, world.engine.requests)
