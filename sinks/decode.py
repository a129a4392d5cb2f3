"""The bytes of a chunk to records. What cannot be read becomes a dead letter with its bytes, so that nothing is lost.

A sink does not write to the dead-letter topic: it stores the dead letter beside the rows, with boundary `sink`, and goes
on. The stage that reads the same bytes is the one that tells the topic.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollstream.errors import SchemaError
from rollstream.schemas.codec import Codec
from rollstream.schemas.identity import digest_bytes, digest_json
from rollstream.schemas.records import DeadLetter, Record
from rollstream.schemas.records.claims import ClaimCheck
from rollstream.sinks.base import Chunk, LogRecord, Source
from rollstream.sinks.columns import broken_array


@dataclass(frozen=True, slots=True)
class Decoded:
    """A record with its place in the log."""

    offset: int
    """Its offset."""
    record: Record
    """The record; a `DeadLetter` where the bytes could not be read."""
    digest: str
    """blake2b-128 of its bytes."""


def decode_chunk(chunk: Chunk, codec: Codec) -> list[Decoded]:
    """The records of a chunk, by offset; as many as the chunk has."""
    return [decode_record(chunk.source, raw, codec) for raw in chunk.records]


def decode_record(source: Source, raw: LogRecord, codec: Codec) -> Decoded:
    """One record, or the dead letter it became."""
    digest = digest_bytes(raw.value)
    try:
        record = codec.decode(raw.value)
        broken = broken_array(record)
        if broken is not None:
            raise SchemaError(
                f"cannot store {type(record).__name__}: the bytes of {broken} are not whole items; the writer packed "
                "them wrongly",
                reason="bad_packed_array",
            )
        return Decoded(raw.offset, record, digest)
    except SchemaError as error:
        letter = dead_letter(source, raw, error.reason, str(error), codec.claim_check(raw.value))
        return Decoded(raw.offset, letter, digest)


def dead_letter(
    source: Source, raw: LogRecord, reason: str, message: str, check: ClaimCheck | None = None
) -> DeadLetter:
    """What is stored of a record that a sink cannot use. Args: check: what stands in Kafka for it, if it is a large one."""
    return DeadLetter(
        dead_letter_id=digest_json(source.topic, source.partition, raw.offset, "sink", reason),
        boundary="sink",
        reason=reason,
        message=message,
        topic=source.topic,
        partition=source.partition,
        offset=raw.offset,
        value=raw.value,
        at_ms=raw.time_ms,
        key=raw.key,
        rollout_id=None if check is None else check.rollout_id,
        call_id=None if check is None else check.call_id,
    )
