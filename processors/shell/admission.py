"""Which decoded records a partition takes: of the kinds that its topic is for, and of groups that belong into it.

A record elsewhere is a foreign writer's, or went through a producer with another partitioner. Its group's other records
are with another worker, so nothing right can be made of it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from aiokafka.partitioner import murmur2

from rollstream.errors import SchemaError
from rollstream.processors.base import Position
from rollstream.schemas.parsed import Parsed, class_of
from rollstream.schemas.records import RECORDS, Record
from rollstream.schemas.topics import PARTITIONER, key_of, topics

Kinds = Mapping[str, frozenset[type[Record]]]
"""Topic noun → the records that it is for."""


def kinds_by_topic() -> Kinds:
    """What the files in `schemas/topics` say."""
    return {noun: frozenset(RECORDS[name] for name in topic.records) for noun, topic in topics().items()}


class Admission:
    """What the partitions of a process take."""

    def __init__(self, partitions: int | None = None, kinds: Kinds | None = None) -> None:
        """Args: partitions: of each topic, None takes every key; kinds: None takes every record."""
        self._partitions = partitions
        self._kinds = kinds

    def check(self, position: Position, record: Record | Parsed) -> None:
        """Nothing, if the record belongs where it stands.

        Raises: SchemaError: reason `foreign_record` or `wrong_partition`.
        """
        kinds = None if self._kinds is None else self._kinds.get(position.noun)
        cls = class_of(record)
        if kinds is not None and cls not in kinds:
            raise SchemaError(
                f"cannot use a {cls.__name__} in topic {position.noun!r}: expected one of "
                f"{sorted(kind.__name__ for kind in kinds)}; find out who writes it",
                reason="foreign_record",
            )
        if self._partitions is None:
            return
        key = key_of(record)
        if (number := partition_of(key, self._partitions)) != position.partition:
            raise SchemaError(
                f"cannot use a {cls.__name__} with key {key!r} in partition {position.partition}: expected it in "
                f"partition {number} of {self._partitions}; set `partitioner={PARTITIONER}` and the group as key where it "
                "is produced",
                reason="wrong_partition",
            )


@lru_cache(16_384)
def partition_of(key: bytes, partitions: int) -> int:
    """Where a key belongs, as the JVM's clients, Faust and our producers have it."""
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)
