"""The stores against each other: ClickHouse, Parquet and the samples topic hold the same rows.

A row is known by its hash, so that 200,000 calls take a few dozen megabytes; hashes are Python's, good within one process.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import Consumer, KafkaError, TopicPartition

from chaos.problem import Problem
from rollstream.errors import BrokerError, SchemaError
from rollstream.kafka import client_properties, watermarks
from rollstream.schemas.codec import Codec, record_name
from rollstream.schemas.records import GroupBuilt, Sample
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.sinks.objects import Manifest, read_manifests, read_records
from rollstream.sinks.rows import ScoreRow
from rollstream.sinks.tables import TABLES, Table

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_TOPIC_TIMEOUT_S = 30.0
_BATCH = 500
_POLL_S = 0.3


@dataclass(slots=True)
class Rows:
    """Hashes of a store's rows by table."""

    by_table: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The rows; one that is stored twice is one."""
    twins: int = 0
    """Rows that were there already, with equal content."""

    def add(self, table: str, row: Any) -> bool:
        """Take a row. Returns: whether it is new."""
        rows, number = self.by_table[table], number_of(row)
        if number in rows:
            self.twins += 1
            return False
        rows.add(number)
        return True


def number_of(row: Any) -> int:
    """What a row is known by. A score that a restart let say the same again took another time for it."""
    return hash(replace(row, score=replace(row.score, latency_ms=0)) if isinstance(row, ScoreRow) else row)


def name_of(row: Any) -> str:
    """What identifies a row, for a message."""
    fields = (
        "dead_letter_id",
        "sample_id",
        "event_id",
        "call_id",
        "rollout_id",
        "group_id",
        "consumption_id",
        "version",
    )
    return str(next((getattr(row, name) for name in fields if hasattr(row, name)), row))


def object_rows(store: ObjectStore, prefix: str) -> Rows:
    """Every row that the Parquet files which count would be in ClickHouse. Args: prefix: `kafka.prefix`."""
    found = Rows()
    for table in TABLES.values():
        for row in _rows_of(store, table, prefix):
            found.add(table.name, row)
    return found


def missing_rows(store: ObjectStore, prefix: str, missing: dict[str, set[int]]) -> Iterator[Problem]:
    """The rows of Parquet behind some hashes, as problems: ClickHouse has none of them."""
    for name, numbers in missing.items():
        for row in _rows_of(store, TABLES[name], prefix) if numbers else ():
            if number_of(row) in numbers:
                yield Problem("lost", name_of(row), f"is in Parquet, and not in table {name}")


def _rows_of(store: ObjectStore, table: Table, prefix: str) -> Iterator[Any]:
    topic = topics()["terminals"].name(prefix) if table.name == "terminals" else None
    for record in read_records(store, table.record, topic):
        yield from table.rows(record)


def check_manifests(store: ObjectStore) -> Iterator[Problem]:
    """Each offset is in one file that counts: chunks of a partition do not overlap, and no file counts twice."""
    manifests = list(read_manifests(store))
    yield from overlaps(manifests)


def overlaps(manifests: list[Manifest]) -> Iterator[Problem]:
    """Files that count more than once, and chunks that share offsets."""
    paths = Counter(file.path for manifest in manifests for file in manifest.files)
    for path, times in paths.items():
        if times > 1:
            yield Problem("doubled", path, f"counts in {times} manifests")
    chunks: dict[tuple[str, str, int], set[tuple[int, int]]] = defaultdict(set)
    kinds: Counter[tuple[str, str, int, int, int, str]] = Counter()
    for manifest in manifests:
        for file in manifest.files:
            source = (file.topic, file.topic_id, file.partition)
            chunks[source].add((file.first, file.last))
            kinds[(*source, file.first, file.last, file.record)] += 1
    for source, ranges in chunks.items():
        ordered = sorted(ranges)
        for (first, last), (following, end) in pairwise(ordered):
            if following <= last:
                message = f"offsets {first} to {last} and {following} to {end} are in two files that count"
                yield Problem("doubled", f"{source[0]}/{source[2]}", message)
    for chunk, times in kinds.items():
        if times > 1 and not any(paths[path] > 1 for path in paths):
            yield Problem(
                "doubled",
                f"{chunk[0]}/{chunk[2]}",
                f"{chunk[5]} of offsets {chunk[3]} to {chunk[4]} counts {times} times",
            )


@dataclass(slots=True)
class TopicLook:
    """What the samples topic holds."""

    rows: Rows = field(default_factory=Rows)
    """Its samples and built groups; `twins` are the copies that restarts wrote."""
    problems: list[Problem] = field(default_factory=list)
    """Ids with two contents, and groups that were announced before their samples."""
    is_whole: bool = True
    """Whether the log still begins with its first record."""


def samples_topic(kafka: KafkaSettings, codec: Codec) -> TopicLook:
    """Read the samples topic to its end. Raises: BrokerError: the broker does not say what it holds."""
    look = TopicLook()
    topic = topics()["samples"]
    name = topic.name(kafka.prefix)
    consumer = Consumer(
        {
            **client_properties(kafka, client_id="rollstream-chaos"),
            "group.id": "rollstream-chaos",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    contents: dict[str, int] = {}
    seen: set[tuple[int, str]] = set()
    try:
        for partition in range(topic.partitions(kafka.partitions)):
            low, high = watermarks(consumer, name, partition, _TOPIC_TIMEOUT_S)
            look.is_whole &= low == 0
            for offset, value in _read(consumer, TopicPartition(name, partition, low), high):
                try:
                    record = codec.decode(value)
                except SchemaError as error:
                    look.problems.append(Problem("wrong", f"{name}/{partition}/{offset}", f"cannot be read: {error}"))
                    continue
                _see(look, record, partition, contents, seen)
    finally:
        consumer.close()
    return look


def _see(look: TopicLook, record: Any, partition: int, contents: dict[str, int], seen: set[tuple[int, str]]) -> None:
    if isinstance(record, Sample):
        identity, table = record.sample_id, "samples"
        seen.add((partition, identity))
    elif isinstance(record, GroupBuilt):
        identity, table = f"{record.group_id}/{record.group_revision}/{record.pipeline_digest}", "built_groups"
        for sample_id in record.sample_ids:
            if (partition, sample_id) not in seen:
                message = f"stands before sample {sample_id!r}, which it names, or without it"
                look.problems.append(Problem("lost", record.group_id, message))
    else:
        look.problems.append(Problem("wrong", record_name(type(record)), "is in the samples topic"))
        return
    if contents.setdefault(identity, hash(record)) != hash(record):
        look.problems.append(Problem("doubled", identity, "is in the samples topic with two contents"))
    look.rows.add(table, record)


def _read(consumer: Consumer, start: TopicPartition, high: int) -> Iterator[tuple[int, bytes]]:
    """Offsets and values of a partition up to `high`."""
    consumer.assign([start])
    at, heard_s = start.offset, time.monotonic()
    while at < high:
        messages = consumer.consume(_BATCH, _POLL_S)  # it waits for the whole batch, so not for long
        if messages:
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s > _TOPIC_TIMEOUT_S:
            raise BrokerError(
                f"cannot read {start.topic} partition {start.partition}: nothing came in {_TOPIC_TIMEOUT_S:g} s at offset "
                f"{at} of {high}; see whether its broker is up",
                reason="broker_down",
            )
        for message in messages:
            error = message.error()
            if error is None:
                offset = cast(int, message.offset())
                yield offset, message.value() or b""
                at = offset + 1
            elif (
                error.code() == KafkaError._PARTITION_EOF
            ):  # the last offsets may be no records: the broker's own marks
                return
            else:
                raise BrokerError(
                    f"cannot read {start.topic} partition {start.partition} at offset {at}: {error}",
                    reason="broker_down",
                )
