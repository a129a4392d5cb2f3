"""C6, C8 and C9 of the design notes (gateway.md §4.1): an engine's answer that is whole, mixed, short or wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.producers.engines.base import LabelSpan
from rollstream.schemas.records import ModelCall, VersionSpan
from rollstream.schemas.types import unpack_floats
from tests.unit.producers.fakes import Play, started_gateway
from tests.unit.producers.toy_cases.toy import HI, ToyEngine, ToyPlay, calls, finish, joined, output, say


async def recorded(folder: Path, play: Play, version: int = 7) -> ModelCall:
    """The record of one call."""
    engine = ToyEngine(play)
    engine.version = version
    async with started_gateway(folder, engine=engine) as rig:
        await say(rig, await rig.open(), HI)
        (call,) = calls(rig.publisher)
    return call


async def test_c6_chunks_that_show_nothing_hold_ids(tmp_path: Path) -> None:
    """A parser holds text back; the ids of all chunks are the answer."""
    call = await recorded(tmp_path, ToyPlay([[13], [15, 16], [18, 14], [2]], counted=6))

    assert ([13, 15, 16, 18, 14, 2], True) == (output(call), call.trainable)


async def test_c6_chunk_that_is_lost_is_found(tmp_path: Path) -> None:
    """The engine counted six; nobody trains on the four that came."""
    call = await recorded(tmp_path, ToyPlay([[13], [18, 14], [2]], counted=6))

    assert ([13, 18, 14, 2], ("token_count_mismatch",), False) == (output(call), call.defects, call.trainable)


async def test_c8_update_within_a_call_gives_each_token_its_version(tmp_path: Path) -> None:
    """7, 7, 7, 8, 8; the rollout says from which to which."""
    engine = ToyEngine(
        ToyPlay([[10, 11, 10], [11, 2]], spans=(LabelSpan(0, 3, "7"), LabelSpan(3, 5, "8")), moves_to=8)
    )
    engine.version = 7
    async with started_gateway(tmp_path, engine=engine) as rig:
        opened = await rig.open()
        await say(rig, opened, HI)
        await finish(rig, opened)

        (call,) = calls(rig.publisher)
        rollout = joined(rig.publisher.written)
    assert ((VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)), True) == (call.version_spans, call.trainable)
    assert (7, 8) == (rollout.version_min, rollout.version_max)


@pytest.mark.parametrize(
    ("play", "code", "versions"),
    [
        (ToyPlay([[10, 11, 10, 11, 2]], spans=(), moves_to=8), "version_interval", (7, 8)),
        (ToyPlay([[10, 11, 10, 11, 2]], spans=()), "version_unknown", (7, 7)),
        (
            ToyPlay([[10, 11, 10, 11, 2]], spans=(LabelSpan(0, 2, "7"), LabelSpan(3, 5, "8")), moves_to=8),
            "span_gap",
            (7, 8),
        ),
    ],
    ids=["interval", "silent", "gap"],
)
async def test_c8_unknown_version_is_no_version(
    tmp_path: Path, play: ToyPlay, code: str, versions: tuple[int, int]
) -> None:
    """Neither the label at the start nor the one at the end stands for all tokens."""
    call = await recorded(tmp_path, play)

    assert ((code,), False, versions) == (call.defects, call.trainable, (call.version_before, call.version_after))


@pytest.mark.parametrize(
    ("value", "code"), [(-9999.0, "logprob_sentinel"), (None, "logprob_missing"), (math.nan, "logprob_missing")]
)
async def test_c9_bad_logprob_keeps_its_place(tmp_path: Path, value: Any, code: str) -> None:
    """The others do not shift, and no number stands in for it."""
    call = await recorded(tmp_path, ToyPlay([[10, 11, 2]], logprobs=[-0.1, value, -0.2]))

    assert ((code,), False) == (call.defects, call.trainable)
    np.testing.assert_array_equal(np.array([-0.1, math.nan, -0.2], "f4"), unpack_floats(call.output_logprobs))
