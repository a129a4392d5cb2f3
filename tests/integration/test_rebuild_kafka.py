"""`rollstream rebuild` on Apache Kafka: what a live processor wrote, made again from the log."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

from rollstream.errors import BrokerError
from rollstream.processors.shell.rebuild import NewTopics
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import (
    CallStarted,
    DeadLetter,
    GroupBuilt,
    GroupRewards,
    GroupScores,
    Record,
    RolloutOpened,
)
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.snapshot import Logged, bounds, open_reader, partition_counts, read_range
from rollstream.topic_admin import apply_topics
from tests.end_to_end.processes import our_process
from tests.end_to_end.topic_reader import is_readable
from tests.integration.shell_log import Writer
from tests.services.kafka import KafkaBroker
from tests.source_log import Entry, source_log

pytestmark = pytest.mark.kafka

CODEC = Codec()
PIPELINE = Path(__file__).parents[2] / "pipelines" / "default.yaml"
R = TypeVar("R", bound=Record)
GROUPS, SIZE = 24, 3
DERIVED = ("rollouts", "groups", "scores", "rewards", "credits", "samples", "dead-letters")


def _source() -> list[Entry]:
    """Groups that are complete, one that is still open, a repeated call, and a call that comes too late."""
    entries = source_log(GROUPS, SIZE, seed=3, start_ms=time.time_ns() // 1_000_000)
    entries = [entry for entry in entries for _ in range(2 if isinstance(entry[1], CallStarted) else 1)]
    opening = next(record for _, record in entries if isinstance(record, RolloutOpened))
    late = next(record for _, record in entries if isinstance(record, CallStarted))
    return [
        *entries,
        ("calls", dataclasses.replace(opening, rollout_id="open", group_id="g-open")),
        ("calls", dataclasses.replace(late, call_id="late")),
    ]


@pytest.fixture(scope="module")
def processed(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> KafkaSettings:
    """Topics with the log, bytes that nobody can read, and everything that a live processor made of them."""
    settings = KafkaSettings(
        bootstrap=kafka.bootstrap, prefix=f"t{uuid.uuid4().hex[:8]}", partitions=3, session_timeout_ms=6_000
    )
    apply_topics(settings)
    writer = Writer(settings)
    for noun, record in _source():
        writer.write(noun, record)
    writer.write_bytes("environment", b"\xff\xff poison", 1)
    writer.flush()
    _wait(lambda: all(is_readable(settings, noun) for noun in DERIVED))
    with our_process("processor", ["processor"], tmp_path_factory.mktemp("live"), settings):
        _wait(lambda: _built(settings) == GROUPS and len(_bytes(settings, "dead-letters")) == 2)
    return settings


def test_rebuild_gives_what_the_processor_wrote_and_twice_the_same_bytes(
    processed: KafkaSettings, tmp_path: Path
) -> None:
    """Two rebuilds are equal record by record, with keys, headers and order, and hold the live run's values."""
    prefixes = [f"{processed.prefix}{end}" for end in ("a", "b")]

    reports = [_run(processed, tmp_path, "--from", "calls", "--to-prefix", prefix).stdout for prefix in prefixes]

    first, second = (processed.model_copy(update={"prefix": prefix}) for prefix in prefixes)
    for noun in DERIVED:
        assert _whole(first, noun) == _whole(second, noun), noun
        assert _values(first, noun) == _values(processed, noun), noun
    assert reports[0] == reports[1]
    assert f"groups: {GROUPS + 2}, 2 of them without samples (g-open, k)" in reports[0]
    assert "open at the end of the log: 1 of calls" in reports[0]
    assert {"unknown_framing", "late"} == {letter.reason for letter in _records(first, "dead-letters", DeadLetter)}


def test_rebuild_from_rollouts_scores_old_rollouts_anew(processed: KafkaSettings, tmp_path: Path) -> None:
    """Another pipeline over old rollouts and groups changes rewards and what follows, and nothing before."""
    values = yaml.safe_load(PIPELINE.read_text("utf-8"))
    values["reward"]["components"] = {"outcome": 3.0}
    pipeline = tmp_path / "tripled.yaml"
    pipeline.write_text(yaml.safe_dump(values))
    rollouts, groups = (processed.model_copy(update={"prefix": f"{processed.prefix}{end}"}) for end in "rg")

    for start, target in (("rollouts", rollouts), ("groups", groups)):
        _run(processed, tmp_path, "--from", start, "--to-prefix", target.prefix, "--pipeline", str(pipeline))

    assert _rewards(groups) == _rewards(rollouts) == {name: 3 * value for name, value in _rewards(processed).items()}
    assert [noun for noun in DERIVED if _whole(rollouts, noun)] == [
        "groups",
        "scores",
        "rewards",
        "credits",
        "samples",
    ]
    assert [noun for noun in DERIVED if _whole(groups, noun)] == ["scores", "rewards", "credits", "samples"]
    assert _built(rollouts) == _built(groups) == GROUPS


def test_rebuild_refuses_topics_that_have_records(processed: KafkaSettings, tmp_path: Path) -> None:
    """Nothing is ever added to what is there, least of all to the live topics."""
    before = _whole(processed, "samples")

    done = _run(processed, tmp_path, "--from", "calls", "--to-prefix", processed.prefix, status=2)

    assert "has records already; take another prefix" in done.stderr
    assert _whole(processed, "samples") == before


@pytest.mark.parametrize("start", ["calls", "rollouts", "groups"])
def test_rebuilt_store_passes_the_audit(processed: KafkaSettings, tmp_path: Path, start: str) -> None:
    """Inputs, what lies upstream of them, and what was made are in the tables: every call has its place."""
    store = f"chdb://{tmp_path}/clickhouse"

    _run(processed, tmp_path, "--from", start, "--to-store", store)

    audit = _cli(processed, tmp_path, "audit", "--store", store, "--json")
    report = json.loads(audit.stdout)
    assert report["ok"], report
    assert (report["counts"]["calls unaccounted"], report["counts"]["calls quarantined"]) == (0, 1)
    assert report["counts"]["groups built"] == GROUPS


def test_record_that_is_not_where_it_belongs_stops_the_rebuild(kafka_settings: KafkaSettings) -> None:
    """Whoever else writes into the new topics, or a record that the broker lost, is noticed by its offset."""
    target = NewTopics(kafka_settings)
    writer = Writer(kafka_settings)
    writer.write_bytes("rollouts", b"foreign", 0)
    writer.flush()

    target.write(Logged(topics()["rollouts"].name(kafka_settings.prefix), 0, 0, 1_000, b"g", b"v"))

    with pytest.raises(BrokerError, match="took as offset 1 what belongs at 0"):
        target.flush()


def _whole(kafka: KafkaSettings, noun: str) -> list[Logged]:
    """Every record, in order, but for when it was appended and to which prefix."""
    name = topics()[noun].name(kafka.prefix)
    with closing(open_reader(kafka, "test")) as reader:
        return [
            dataclasses.replace(record, topic=noun, timestamp=0)
            for number, (first, end) in bounds(reader, name, partition_counts(reader, [name])[name]).items()
            for record in read_range(reader, name, number, first, end)
        ]


def _bytes(kafka: KafkaSettings, noun: str) -> list[tuple[int, bytes]]:
    return [(record.partition, record.value or b"") for record in _whole(kafka, noun)]


def _run(kafka: KafkaSettings, folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = _cli(kafka, folder, "rebuild", *arguments)
    assert done.returncode == status, done.stderr
    return done


def _cli(kafka: KafkaSettings, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        "ROLLSTREAM_KAFKA__BOOTSTRAP": kafka.bootstrap,
        "ROLLSTREAM_KAFKA__PREFIX": kafka.prefix,
        "ROLLSTREAM_PROCESSOR__PIPELINE": str(PIPELINE),
        "PYTHONPATH": str(PIPELINE.parents[1]),
    }
    command = [sys.executable, "-m", "rollstream", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def _values(kafka: KafkaSettings, noun: str) -> set[tuple[int, bytes | str]]:
    """Partition and value of every record; of scores their digest, since a live run writes how long they took."""
    found = _bytes(kafka, noun)
    if noun != "scores":
        return set(found)
    return {(partition, scores.digest) for partition, scores in _decoded(found) if isinstance(scores, GroupScores)}


def _decoded(found: Iterable[tuple[int, bytes]]) -> Iterable[tuple[int, Record]]:
    return ((partition, CODEC.decode(value)) for partition, value in found)


def _records(kafka: KafkaSettings, noun: str, kind: type[R]) -> list[R]:
    return [record for _, record in _decoded(_bytes(kafka, noun)) if isinstance(record, kind)]


def _rewards(kafka: KafkaSettings) -> dict[str, float]:
    found = _records(kafka, "rewards", GroupRewards)
    return {
        reward.rollout_id: reward.value for group in found for reward in group.rewards if reward.value is not None
    }


def _built(kafka: KafkaSettings) -> int:
    return len({built.group_id for built in _records(kafka, "samples", GroupBuilt)})


def _wait(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
        time.sleep(0.05)
