"""A record as a Kafka message: topic, key, value, time, CloudEvents attributes as headers.

A record that goes by claim has the header `ce_dataref` with the claim's name, beside the check in its value.

Source: CloudEvents 1.0.2, Kafka protocol binding, binary content mode; Dataref extension.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rollstream.schemas.codec import Claim, Codec, record_name
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.parsed import Parsed, class_of, field_names, fields_of
from rollstream.schemas.records import Record
from rollstream.schemas.topics import key_of, topic_of

_TIME_FIELDS = (
    "at_ms",
    "finished_at_ms",
    "closed_at_ms",
    "created_at_ms",
    "published_at_ms",
    "started_at_ms",
    "opened_at_ms",
)


@dataclass(frozen=True, slots=True)
class Message:
    """What a producer sends."""

    topic: str
    """Full topic name."""
    key: bytes
    """Kafka key."""
    value: bytes
    """Framed record."""
    timestamp_ms: int
    """Event time."""
    headers: tuple[tuple[str, bytes], ...]
    """CloudEvents attributes."""
    claim: Claim | None = None
    """What must be in the claim store before this is sent; None if there is nothing to store, or it is stored."""


def to_message(record: Record, codec: Codec, *, prefix: str, source: str, noun: str | None = None) -> Message:
    """Put a record into its envelope, and a large one's content into the claim store. Blocks while it does the latter.

    Args:
        prefix: topic prefix, for instance `rollstream`.
        source: CloudEvents source: who writes, for instance `/gateway`.
        noun: topic to write to where it is not the record's own (a terminal in `calls`).

    Raises: SchemaError, BrokerError: as `Codec.encode`.
    """
    message = draft_message(record, codec, prefix=prefix, source=source, noun=noun)
    if message.claim is None:
        return message
    codec.store(message.claim)
    return replace(message, claim=None)


def draft_message(record: Record, codec: Codec, *, prefix: str, source: str, noun: str | None = None) -> Message:
    """As `to_message`, but a claim is left to be stored by whoever sends the message: for event loops."""
    topic = topic_of(type(record))
    name = topic.name(prefix) if noun is None else topic.name(prefix).replace(f".{topic.noun}.", f".{noun}.")
    value, claim = codec.pack(record)
    headers = (
        ("ce_specversion", b"1.0"),
        ("ce_type", f"rollstream.{record_name(type(record))}".encode()),
        ("ce_source", source.encode()),
        ("ce_id", digest_bytes(value).encode()),
        ("content-type", b"application/avro"),
        *(() if claim is None else (("ce_dataref", claim.name.encode()),)),
    )
    return Message(name, key_of(record), value, event_time_ms(record), headers, claim)


def event_time_ms(record: Record | Parsed) -> int:
    """When the thing a record tells of happened, UTC epoch milliseconds."""
    cls, fields = class_of(record), fields_of(record)
    for name in _time_fields(cls):
        value = fields[name]
        if value is not None:
            return int(value)
    if "group" in field_names(cls):
        return int(fields_of(fields["group"])["closed_at_ms"])
    raise TypeError(f"{cls.__name__} has no time field")


@functools.cache
def _time_fields(cls: type) -> tuple[str, ...]:
    """Those that a class has."""
    return tuple(name for name in _TIME_FIELDS if name in field_names(cls))
