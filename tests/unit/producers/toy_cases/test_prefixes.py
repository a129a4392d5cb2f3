"""C1, C2, C4 and C5 of the design notes (gateway.md §4.1): what a client echoes renders to other ids than were sampled, or not.

Always right: independent samples, of which each holds the ids that were in and came out. Two share a row only if all ids agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollstream.processors.rows import Row, lay_out
from tests.unit.producers.fakes import Play, Rig, started_gateway
from tests.unit.producers.toy_cases.toy import (
    HI,
    P,
    ThinkingTongue,
    ToyEngine,
    calls,
    finish,
    joined,
    output,
    prompts,
    say,
    shared,
)


async def rows(rig: Rig, opened: dict[str, Any]) -> list[Row]:
    """How build lays the rollout out, where it may merge."""
    await finish(rig, opened)
    found, masked = lay_out(joined(rig.publisher.written), "merge", {})
    assert [] == masked
    return found


def mask(row: Row) -> list[int]:
    """1 for each sampled token."""
    sampled = {at for part in row.calls for at in range(part.start, part.end)}
    return [int(at in sampled) for at in range(len(row.ids))]


async def test_c1_other_split_of_the_same_text_makes_two_samples(tmp_path: Path) -> None:
    """`ab` was sampled as a, b and is echoed as one token; neither the sample nor the prompt is touched."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[10], [11, 2]]), Play([[28, 2]]))) as rig:
        opened = await rig.open()
        echo = await say(rig, opened, HI)
        await say(rig, opened, HI, echo, {"role": "user", "content": "b"})

        assert [P, [*P, 12, 2, 3, 1, 4, 3, 11, 2, 3, 1, 5, 3]] == prompts(rig.publisher)
        assert ([10, 11, 2], (9, 12)) == (output(calls(rig.publisher)[0]), shared(rig.publisher))
        assert 2 == len(await rows(rig, opened))


async def test_c2_thought_is_gone_when_the_user_speaks_again(tmp_path: Path) -> None:
    """The template leaves it out of the next prompt: not mergeable."""
    thinking = Play([[7, 3, 10, 3, 8, 9, 28, 2]])
    async with started_gateway(tmp_path, engine=ToyEngine(thinking, Play(), tongue=ThinkingTongue())) as rig:
        opened = await rig.open()
        echo = {**await say(rig, opened, HI), "content": "ok"}
        await say(rig, opened, HI, echo, {"role": "user", "content": "b"})

        assert [*P, 28, 2, 3, 1, 4, 3, 11, 2, 3, 1, 5, 3] == prompts(rig.publisher)[1]
        assert ((9, 17), 2) == (shared(rig.publisher), len(await rows(rig, opened)))


async def test_c2_thought_stays_while_tools_go_on(tmp_path: Path) -> None:
    """The same model and template: mergeable, so it is no property of the model."""
    thinking = Play([[7, 3, 10, 3, 8, 9, 28, 2]])
    async with started_gateway(tmp_path, engine=ToyEngine(thinking, Play(), tongue=ThinkingTongue())) as rig:
        opened = await rig.open()
        echo = await say(rig, opened, HI)
        await say(rig, opened, HI, echo, {"role": "tool", "tool_call_id": "t", "content": "1"})

        assert [*P, 7, 3, 10, 3, 8, 9, 28, 2, 3, 1, 6, 3, 18, 2, 3, 1, 5, 3] == prompts(rig.publisher)[1]
        assert ((17, 17), 1) == (shared(rig.publisher), len(await rows(rig, opened)))


async def test_c4_echoed_json_has_other_spaces(tmp_path: Path) -> None:
    """The client parses and prints the object; the record keeps what was sampled, ids and characters."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[13, 15, 16, 18, 14, 2]]), Play())) as rig:
        opened = await rig.open()
        echo = await say(rig, opened, HI)
        printed = json.dumps(json.loads(echo["content"]))
        await say(rig, opened, HI, {**echo, "content": printed}, {"role": "user", "content": "b"})

        first = calls(rig.publisher)[0]
        assert [*P, 13, 15, 17, 18, 14, 2] == prompts(rig.publisher)[1][:15]
        assert ([13, 15, 16, 18, 14, 2], '{"x":1}') == (output(first), json.loads(first.message)["content"])
        assert ((11, 15), 2) == (shared(rig.publisher), len(await rows(rig, opened)))


async def test_c5_end_token_is_trained_on_and_the_glue_behind_it_is_not(tmp_path: Path) -> None:
    """The newline after the end token comes from the template."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[28], [2]]), Play([[11, 2]]))) as rig:
        opened = await rig.open()
        echo = await say(rig, opened, HI)
        await say(rig, opened, HI, echo, {"role": "user", "content": "b"})

        (row,) = await rows(rig, opened)
        assert [*P, 28, 2, 3, 1, 4, 3, 11, 2, 3, 1, 5, 3, 11, 2] == row.ids.tolist()
        assert [0] * 9 + [1, 1] + [0] * 10 + [1, 1] == mask(row)


async def test_c5_answer_that_was_cut_has_no_end_token(tmp_path: Path) -> None:
    """The template closes the message: its end token was not sampled, and none is made up."""
    async with started_gateway(tmp_path, engine=ToyEngine(Play([[28]], reason="length"), Play([[11, 2]]))) as rig:
        opened = await rig.open()
        echo = await say(rig, opened, HI)
        await say(rig, opened, HI, echo, {"role": "user", "content": "b"})

        (row,) = await rows(rig, opened)
        assert [28] == output(calls(rig.publisher)[0])
        assert [*P, 28, 2, 3, 1, 4, 3, 11, 2, 3, 1, 5, 3, 11, 2] == row.ids.tolist()
        assert [0] * 9 + [1] + [0] * 11 + [1, 1] == mask(row)
