"""Stores against each other: a row that one of them lacks, an offset that counts twice, an id with two contents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.check_stores import Rows, TopicLook, _see, check_manifests, missing_rows, object_rows, overlaps
from chaos.compare import Verdict, _take, add_topic, rules_of
from rollstream.errors import SettingsError
from rollstream.object_store import open_store
from rollstream.processors.pipeline import load_pipeline
from rollstream.schemas.records import GroupBuilt, RolloutStatus, Sample
from rollstream.sinks.base import Source
from rollstream.sinks.objects import DataFile, Manifest, ObjectSink
from rollstream.sinks.tables import TABLES, is_stored, table_of
from tests.unit.sinks.chain import CODEC, ROOT, Log, make_log


@pytest.fixture(scope="module")
def log() -> Log:
    return make_log()


def rows_of(log: Log) -> Rows:
    """What ClickHouse would hold."""
    rows = Rows()
    for noun, records in log.records.items():
        for record in records:
            if is_stored(record, f"rollstream.{noun}.v1"):
                for row in table_of(type(record)).rows(record):
                    rows.add(table_of(type(record)).name, row)
    return rows


def test_parquet_is_read_as_the_rows_that_clickhouse_has(log: Log, tmp_path: Path) -> None:
    """Both stores of one log have equal rows in every table, and its files count once."""
    store = open_store(str(tmp_path))
    sink = ObjectSink(store, CODEC)
    for chunk in log.chunks(7):
        sink.write([chunk])

    found, expected = object_rows(store, "rollstream"), rows_of(log)

    assert expected.by_table == {name: rows for name, rows in found.by_table.items() if rows}
    assert (
        {"model_calls", "rollouts", "groups", "samples", "dead_letters"} <= expected.by_table.keys() <= TABLES.keys()
    )
    assert [] == list(check_manifests(store))


def test_score_that_was_said_again_is_the_same_score(log: Log) -> None:
    """A scorer that runs again after a restart takes another time, and what it says is what counts."""
    scores: Any = log.records["scores"][0]
    first, *_ = table_of(type(scores)).rows(scores)
    later = replace(first, score=replace(first.score, latency_ms=first.score.latency_ms + 7))
    other = replace(first, score=replace(first.score, value=99.0))
    rows = Rows()

    assert [True, False, True] == [rows.add("scores", row) for row in (first, later, other)]
    assert 1 == rows.twins


def test_row_that_only_parquet_has_is_named(log: Log, tmp_path: Path) -> None:
    """Rows are known by hashes; who is missing is found out by reading Parquet again."""
    store = open_store(str(tmp_path))
    ObjectSink(store, CODEC).write(log.chunks())
    call: Any = next(record for record in log.records["calls"] if type(record).__name__ == "ModelCall")

    found = list(missing_rows(store, "rollstream", {"model_calls": {hash(call)}, "samples": set()}))

    assert [("lost", call.call_id)] == [(problem.kind, problem.about) for problem in found]


def test_row_that_only_clickhouse_has_or_has_twice_is_named(log: Log) -> None:
    """Each row of a table is in Parquet, and a table says FINAL."""
    one: Any = log.records["samples"][0]
    verdict, in_objects = Verdict(), Rows()

    _take(Rows(), "samples", [one, one], in_objects, verdict)

    assert [("lost", one.sample_id), ("doubled", one.sample_id), ("lost", one.sample_id)] == [
        (problem.kind, problem.about) for problem in verdict.examples
    ]


def manifest(seq: int, *ranges: tuple[int, int], path: str = "") -> Manifest:
    files = tuple(
        DataFile(path or f"data/{seq}/{first}", "sample", "t", "id", 0, first, last, 1, 1, "x")
        for first, last in ranges
    )
    return Manifest(seq, files, {Source("t", 0, "id"): 9})


@pytest.mark.parametrize(
    ("manifests", "problems"),
    [
        ([manifest(1, (0, 4), (5, 9)), manifest(2, (12, 13))], 0),
        ([manifest(1, (0, 4)), manifest(2, (4, 9))], 1),
        ([manifest(1, (0, 4)), manifest(2, (0, 4))], 1),
        ([manifest(1, (0, 4), path="a"), manifest(2, (0, 4), path="a")], 1),
    ],
)
def test_offset_counts_once(manifests: list[Manifest], problems: int) -> None:
    """Gaps are the broker's own records; an overlap, or a file or chunk that is named again, counts its records twice."""
    found = list(overlaps(manifests))

    assert ["doubled"] * problems == [problem.kind for problem in found]


def look_at(*records: object) -> TopicLook:
    look, contents, seen = TopicLook(), {}, set()  # type: ignore[var-annotated]
    for record in records:
        _see(look, record, 0, contents, seen)
    return look


def group_of(log: Log) -> tuple[list[Sample], GroupBuilt]:
    built = next(record for record in log.records["samples"] if isinstance(record, GroupBuilt))
    samples = [r for r in log.records["samples"] if isinstance(r, Sample) and r.sample_id in built.sample_ids]
    return samples, built


def test_twins_are_counted_and_are_no_error(log: Log) -> None:
    """What a restart wrote again is equal, and every reader drops it."""
    samples, built = group_of(log)

    look = look_at(*samples, built, *samples, built)

    assert ([], len(samples) + 1) == (look.problems, look.rows.twins)


def test_id_with_two_contents_is_doubled(log: Log) -> None:
    """Two samples under one id: a trainer would take whichever comes first."""
    samples, built = group_of(log)

    look = look_at(*samples, built, replace(samples[0], reward=9.0))

    assert [("doubled", samples[0].sample_id)] == [(problem.kind, problem.about) for problem in look.problems]


def test_group_stands_behind_its_samples(log: Log) -> None:
    """A reader that has read the group has read its samples."""
    samples, built = group_of(log)

    look = look_at(*samples[1:], built, samples[0])

    assert [("lost", built.group_id)] == [(problem.kind, problem.about) for problem in look.problems]


def test_topic_and_table_hold_the_same(log: Log) -> None:
    """A sample that is on the topic only is lost, one that is in the table only is wrong; not so once the log was cut."""
    samples, built = group_of(log)
    look, tables = look_at(*samples, built), rows_of(log)
    for rows in (tables.by_table["samples"], tables.by_table["built_groups"]):
        rows.intersection_update(look.rows.by_table["samples"] | look.rows.by_table["built_groups"])
    tables.by_table["samples"].remove(hash(samples[0]))
    tables.by_table["built_groups"].add(17)

    verdict, cut = Verdict(), Verdict()
    add_topic(verdict, look, tables)
    look.is_whole = False
    add_topic(cut, look, tables)

    assert (1, 1, 0) == (verdict.lost, verdict.wrong, verdict.doubled)
    assert (1, 0) == (cut.lost, cut.wrong)


def test_pipeline_that_cannot_be_recomputed_is_refused() -> None:
    """A comparison with other formulas than the pipeline's would find everything wrong, or nothing."""
    config = load_pipeline(ROOT / "pipelines/default.yaml").config

    assert 600_000 == rules_of(config).join_deadline_ms
    for part, knobs, expected in (
        ("credit", {"method": "rloo"}, "expected grpo"),
        ("reward", {"components": {"outcome": 0.5}}, "weighs 1"),
        ("group", {"counts": (RolloutStatus.SUCCEEDED,)}, r"group.counts=\['succeeded'\], expected all statuses"),
        ("group", {"late": "revision"}, "group.late='revision', expected 'dead_letter'"),
    ):
        other = config.model_copy(update={part: getattr(config, part).model_copy(update=knobs)})
        with pytest.raises(SettingsError, match=expected):
            rules_of(other)


def test_pipeline_of_the_chaos_run_is_known() -> None:
    """What `make chaos` runs is what its comparison can recompute."""
    assert 120_000 == rules_of(load_pipeline(ROOT / "chaos/pipeline.yaml").config).group_deadline_ms


@pytest.mark.parametrize(
    ("certain", "full", "missing"),
    [(300, 50, []), (299, 50, ["rollouts"]), (300, 49, ["groups"]), (0, 0, ["rollouts", "groups"])],
)
def test_run_in_which_next_to_nothing_was_certain_proves_nothing(certain: int, full: int, missing: list[str]) -> None:
    """Deadlines that end before what a fault takes leave nothing to ask for: that is no success."""
    counts = {"finishes acknowledged": 1_000, "rollouts certain": certain, "groups": 500}
    verdict = Verdict(counts={**counts, "groups certain to be full": full})

    verdict.demand()

    assert missing == [told.split()[0] for told in verdict.too_little]
    assert verdict.ok is not bool(missing)


def test_run_without_anything_proves_nothing() -> None:
    """A share of nothing is reached by nothing."""
    verdict = Verdict()

    verdict.demand()

    assert 2 == len(verdict.too_little)
