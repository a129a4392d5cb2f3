"""Generated rollouts: whatever is sampled, echoed, cut or left, the records say what happened, and rows hold what was sampled.

A few hundred cases by default. `GENERATED_CASES=10000` plays as many as it says. A failure names the case's number;
`Stage.play(number)` plays it again.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.processors.base import Event, Position
from rollstream.processors.pipeline import load_pipeline
from rollstream.processors.rows import Row, lay_out
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.records import CallDelivery, CallStarted, ModelCall, Record, Rollout
from rollstream.schemas.types import unpack_floats
from tests.generated.checker import ExpectedRow, check_records, codes_of, expected_rows
from tests.generated.play import Played, Stage
from tests.generated.talk import ECHOES, TEMPLATES

CASES = int(os.environ.get("GENERATED_CASES", "300"))
_PIPELINE = Path(__file__).parents[2] / "pipelines/default.yaml"
_CODEC = Codec()
_CODES = {
    "token_count_mismatch", "logprob_missing", "logprob_sentinel", "logprob_positive", "span_gap", "version_label",
    "version_unknown", "version_interval", "prompt_mismatch", "vocabulary", "semantics_unknown", "semantics_raw",
    "truncated_prompt", "not_completed", "empty_output",
}  # fmt: skip
_SITUATIONS = {
    *TEMPLATES, *ECHOES, "head changes", "goes back", "sub-agent", "compacted", "two at once", "sent again", "asked again",
    "marked", "left", "died", "part", "no", "lost chunk", "update",
}  # fmt: skip


class Joined:
    """The join of the default pipeline, which all cases go through."""

    def __init__(self) -> None:
        (self._join,) = (stage for stage in load_pipeline(_PIPELINE).build_stages(0) if stage.name == "join")
        self._offset = 0

    def rollout(self, played: Played) -> Rollout:
        """What it makes of a case."""
        emits: list[Any] = []
        for noun, record in played.written:
            self._offset += 1
            at, time_ms = Position(noun, 0, self._offset), event_time_ms(record)
            emits += self._join.apply(Event(at, record, time_ms, _CODEC.encode(record))).emits
        (emit,) = emits
        (rollout,) = emit.records
        assert isinstance(rollout, Rollout)
        return rollout


def told(rows: list[Row]) -> list[ExpectedRow]:
    """Rows as the checker words them."""
    found = []
    for row in rows:
        mask, logprobs = [0] * len(row.ids), [0.0] * len(row.ids)
        for part in row.calls:
            mask[part.start : part.end] = [1] * (part.end - part.start)
            logprobs[part.start : part.end] = unpack_floats(part.call.output_logprobs).tolist()
        found.append(ExpectedRow(tuple(row.ids.tolist()), tuple(mask), tuple(logprobs)))
    return found


@pytest.mark.timeout(300 + CASES // 4)
async def test_records_and_rows_of_generated_rollouts_are_what_happened(tmp_path: Path) -> None:
    """No difference in any case, and the cases reach every defect code and every situation that they are made for."""
    stage, joined = Stage(tmp_path / "spool"), Joined()
    names: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    merged = 0
    for number in range(CASES):
        played = await stage.play(number)
        assert [] == check_records(played.attempts, [record for _, record in played.written]), f"case {number}"
        rollout = joined.rollout(played)
        for layout, may_merge in (("split", False), ("merge", True)):
            rows, _ = lay_out(rollout, layout, {})  # type: ignore[arg-type]
            expected = expected_rows(played.attempts, may_merge=may_merge)
            assert sorted(expected, key=repr) == sorted(told(rows), key=repr), f"case {number}, {layout}"
            merged += sum(len(row.calls) - 1 for row in rows)
        names.update(played.names)
        codes.update(code for attempt in played.attempts for code in codes_of(attempt) or {""})

    assert set() == _SITUATIONS - set(names)
    assert set() == _CODES - set(codes)
    assert (True, True) == (codes[""] > CASES, merged > CASES // 4)


Change = Callable[[ModelCall], ModelCall]


def _without_last(packed: bytes) -> bytes:
    return packed[:-4]


def _faults() -> Iterator[tuple[str, Change]]:
    """Wrong records, each a bug that somebody had; gateway.md §4 of the design notes names the threads."""
    yield "end token lost", lambda c: replace(c, output_ids=_without_last(c.output_ids))
    yield "log-probability lost", lambda c: replace(c, output_logprobs=_without_last(c.output_logprobs))
    yield "log-probability filled in", lambda c: replace(c, output_logprobs=bytes(len(c.output_logprobs)))
    yield "other split", lambda c: replace(c, output_ids=b"\x0c\0\0\0" + c.output_ids[4:])
    yield "one version for all", lambda c: replace(c, version_spans=(replace(c.version_spans[0], version=99),))
    yield "shorter base", lambda c: replace(c, prompt=replace(c.prompt, base_len=c.prompt.base_len - 1))
    yield "other prompt", lambda c: replace(c, prompt=replace(c.prompt, suffix=b"\x07\0\0\0" + c.prompt.suffix[4:]))
    yield "other digest", lambda c: replace(c, prompt=replace(c.prompt, digest="0" * 32))
    yield "not trainable", lambda c: replace(c, trainable=not c.trainable)
    yield "code lost or made up", lambda c: replace(c, defects=c.defects[1:] or ("span_gap",))
    yield "attempt taken for a call", lambda c: replace(c, call_id=c.call_id + "x")
    yield "further attempt", lambda c: replace(c, call_attempt=c.call_attempt + 1)
    yield "abort taken for an end", lambda c: replace(c, outcome=type(c.outcome).ABORTED)


@pytest.fixture(scope="module")
def some_cases(tmp_path_factory: pytest.TempPathFactory) -> list[Played]:
    """A few rollouts, as they were played."""

    async def play() -> list[Played]:
        stage = Stage(tmp_path_factory.mktemp("spool"))
        return [await stage.play(number) for number in range(40)]

    return asyncio.run(play())


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in _faults()])
def test_checker_finds_a_wrong_record(some_cases: list[Played], change: Change) -> None:
    """One outcome of a rollout is changed, and the checker names it."""
    tried = 0
    for number, played in enumerate(some_cases):
        records = [record for _, record in played.written]
        for at, call in enumerate(records):
            if not isinstance(call, ModelCall) or not (
                call.trainable and call.prompt.suffix and call.prompt.base_len
            ):
                continue
            changed = change(call)
            if changed == call:
                continue
            tried += 1
            wrong: list[Record] = [*records[:at], changed, *records[at + 1 :]]
            assert [] != check_records(played.attempts, wrong), f"case {number}"
    assert tried > 5


@pytest.mark.parametrize("kind", [CallStarted, ModelCall, CallDelivery])
def test_checker_finds_a_lost_and_a_doubled_record(some_cases: list[Played], kind: type) -> None:
    """Of intents, outcomes and corrections alike."""
    tried = 0
    for number, played in enumerate(some_cases):
        records = [record for _, record in played.written]
        for at in [at for at, record in enumerate(records) if isinstance(record, kind)]:
            tried += 1
            assert [] != check_records(played.attempts, [*records[:at], *records[at + 1 :]]), f"case {number}: lost"
            assert [] != check_records(played.attempts, [*records[: at + 1], *records[at:]]), (
                f"case {number}: doubled"
            )
    assert tried > 3
