"""The schema files: classes, files, topics and examples agree, and the examples tell the truth about digests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.schemas.check import check_all
from rollstream.schemas.codec import CLASSES, Codec, record_name, with_digest
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.readable import from_readable
from rollstream.schemas.records import RECORDS, GroupScores, ModelCall, Record, Rollout, Sample
from rollstream.schemas.topics import key_of
from rollstream.schemas.types import unpack_floats, unpack_ids, unpack_mask
from tests.contract.checkout import ROOT
from tests.contract.example_story import texts

PASSING = sorted((ROOT / "schemas" / "examples").rglob("*.pass.json"))
RECORDED = [path for path in PASSING if json.loads(path.read_text("utf-8"))["record"] in RECORDS]
"""Without claim checks, which only stand for a record."""


def _read(path: Path) -> Record:
    case = json.loads(path.read_text("utf-8"))
    return from_readable(CLASSES[case["record"]], case["value"])


def test_schema_checks_find_no_problem() -> None:
    """What `rollstream schemas check` runs is clean."""
    assert check_all() == []


def test_every_record_has_a_passing_example() -> None:
    """A reader can look at one whole record of each kind."""
    shown = {record_name(type(_read(path))) for path in PASSING}

    assert set(CLASSES) == shown


def _digested(value: Any) -> Iterator[Any]:
    """Every record inside a record, itself included, that carries a digest of its own content."""
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) in RECORDS.values() and any(f.name == "digest" for f in fields(value)):
            yield value
        for field in fields(value):
            yield from _digested(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _digested(item)


@pytest.mark.parametrize("path", PASSING, ids=lambda path: path.name)
def test_example_digests_are_those_of_the_content(path: Path) -> None:
    """A digest in an example can be computed from what stands beside it."""
    for record in _digested(_read(path)):
        content = record
        if isinstance(record, GroupScores):
            content = replace(record, scores=tuple(replace(score, latency_ms=0) for score in record.scores))

        assert with_digest(content).digest == record.digest


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_example_tells_key_and_time_before_its_record_is_made(path: Path) -> None:
    """What was read and not made answers as the record does, and becomes it."""
    record = _read(path)
    codec = Codec()

    parsed = codec.parse(codec.encode(record))

    assert (type(record), key_of(record), event_time_ms(record)) == (
        parsed.cls,
        key_of(parsed),
        event_time_ms(parsed),
    )
    assert record == parsed.make()


def test_examples_are_what_the_stages_write() -> None:
    """The files are the story told again: sources by hand, the rest by the stages with the pipeline that ships.

    A difference means that a record's content changed. If that was meant, run `python -m tests.contract.example_story`.
    """
    folder = ROOT / "schemas" / "examples"

    files = {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.json")}

    assert texts() == files


def test_example_prompts_decode_and_reach_the_sample() -> None:
    """The example rollout's prompt deltas decode, and its sample holds exactly its calls' tokens."""
    rollout = _read(ROOT / "schemas/examples/rollouts/v1/succeeded.pass.json")
    sample = _read(ROOT / "schemas/examples/samples/v1/merged_rollout.pass.json")
    assert isinstance(rollout, Rollout)
    assert isinstance(sample, Sample)

    prompts, failed = decode_prompts(rollout.calls)

    assert failed == {}
    ids, mask, logprobs = unpack_ids(sample.ids), unpack_mask(sample.mask), unpack_floats(sample.logprobs)
    calls: dict[str, ModelCall] = {call.call_id: call for call in rollout.calls}
    for segment in sample.segments:
        assert prompts[segment.call_id].tolist() == ids[: segment.start].tolist()
        assert unpack_ids(calls[segment.call_id].output_ids).tolist() == ids[segment.start : segment.end].tolist()
        assert calls[segment.call_id].output_logprobs == logprobs[segment.start : segment.end].tobytes()
        assert mask[segment.start : segment.end].all()
    assert int(mask.sum()) == sample.sampled_tokens
