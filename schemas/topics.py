"""Topics, read from `topics/*.yaml`: one file a topic, with its purpose, key, partitions, retention and owner."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from rollstream.errors import SchemaError
from rollstream.schemas.parsed import Parsed, class_of, field_names, fields_of
from rollstream.schemas.records import RECORDS, Record

PARTITIONER = "murmur2_random"
"""librdkafka's name of the partitioner that Faust and the JVM use. Its own default puts keys elsewhere."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic."""

    noun: str
    """What it holds, for instance `calls`."""
    version: int
    """Version in its name."""
    purpose: str
    """One sentence."""
    key: str
    """The record field that is the key."""
    family: str
    """Topics of one family have the same number of partitions; family `rollout` is keyed by group_id."""
    cleanup: str
    """`delete` or `compact`."""
    retention_ms: int
    """How long records stay; -1 for ever."""
    owner: str
    """Who writes it and answers for it."""
    consumers: tuple[str, ...]
    """Who reads it."""
    records: tuple[str, ...]
    """Names of the records it may hold."""

    def name(self, prefix: str = "rollstream") -> str:
        """The topic's full name, for instance `rollstream.calls.v1`."""
        return f"{prefix}.{self.noun}.v{self.version}"

    def partitions(self, rollout_partitions: int) -> int:
        """Number of partitions: as set for the family `rollout`, one for all others."""
        return rollout_partitions if self.family == "rollout" else 1


@functools.cache
def topics() -> dict[str, Topic]:
    """All topics by noun."""
    found: dict[str, Topic] = {}
    for file in sorted(resources.files("rollstream.schemas").joinpath("topics").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            topic = _read(file.name, yaml.safe_load(file.read_text("utf-8")))
            found[topic.noun] = topic
    return found


def topic_of(record: type[Record]) -> Topic:
    """The topic a record is written to; `Terminal` also goes into two others (see `TERMINAL_TOPICS`)."""
    try:
        return _topics_by_record()[record]
    except KeyError:
        raise SchemaError(
            f"no topic holds {record.__name__}; add it to a file in schemas/topics", reason="no_topic"
        ) from None


@functools.cache
def _topics_by_record() -> dict[type[Record], Topic]:
    found = {RECORDS[name]: topic for topic in topics().values() for name in topic.records if name != "terminal"}
    return {**found, RECORDS["terminal"]: topics()["terminals"]}


TERMINAL_TOPICS = ("calls", "environment", "terminals")
"""Where a rollout's terminal is written, in this order; it is complete once read in all three."""


def key_of(record: Record | Parsed) -> bytes:
    """The Kafka key of a record."""
    cls, fields = class_of(record), fields_of(record)
    key = topic_of(cls).key
    if key not in field_names(cls):  # stage records hold their group
        fields = fields_of(fields["group"])
    return str(fields[key]).encode()


def _read(name: str, values: dict[str, Any]) -> Topic:
    try:
        topic = Topic(**{**values, "consumers": tuple(values["consumers"]), "records": tuple(values["records"])})
    except (TypeError, KeyError) as cause:
        raise SchemaError(
            f"cannot read schemas/topics/{name}: {cause}; expected the fields {sorted(Topic.__dataclass_fields__)}",
            reason="bad_topic_file",
        ) from cause
    unknown = set(topic.records) - set(RECORDS)
    if unknown:
        raise SchemaError(
            f"cannot read schemas/topics/{name}: unknown records {sorted(unknown)}, expected some of {sorted(RECORDS)}",
            reason="bad_topic_file",
        )
    return topic
