"""What goes in and out of a partition, in Kafka's terms but without a client: messages, dead letters, the header `rs_used`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollstream.errors import SchemaError
from rollstream.processors.base import Event, Position
from rollstream.schemas.envelope import Message
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import DeadLetter, Record
from rollstream.schemas.records.claims import ClaimCheck

USED_HEADER = "rs_used"
"""Header of a derived record: JSON, the highest offset it was made from, by topic noun, in its own partition."""


class Incoming(Protocol):
    """The parts of a consumed message that the shell reads; a client's own record class has them."""

    @property
    def offset(self) -> int:
        """Where it stands."""

    @property
    def timestamp(self) -> int:
        """Event time, UTC epoch milliseconds."""

    @property
    def key(self) -> bytes | None:
        """Key."""

    @property
    def value(self) -> bytes | None:
        """Framed record."""

    @property
    def headers(self) -> Iterable[tuple[str, bytes]]:
        """Headers."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send, and what to do once the broker has acknowledged it."""

    message: Message
    """What to send."""
    partition: int | None
    """Where to; None leaves it to the key."""
    record: Record
    """The record behind the bytes."""
    on_ack: Callable[[Outgoing, int], None]
    """Called with the message and its offset."""

    @property
    def size_bytes(self) -> int:
        """What it holds in memory while it waits: its value, and the claim that has to be stored before it is sent."""
        return len(self.message.value) + (0 if self.message.claim is None else len(self.message.claim.data))


def used_header(used: Iterable[Position]) -> tuple[str, bytes]:
    """The header that names the highest offset used in each topic."""
    highest: dict[str, int] = {}
    for position in used:
        if position.offset > highest.get(position.noun, -1):
            highest[position.noun] = position.offset
    return USED_HEADER, json.dumps(highest, sort_keys=True, separators=(",", ":")).encode()


def read_used(headers: Iterable[tuple[str, bytes]]) -> Mapping[str, int]:
    """The offsets that a derived record was made from; nothing if a foreign writer left the header out.

    Raises: SchemaError: reason `malformed_header`.
    """
    for name, value in headers:
        if name == USED_HEADER:
            try:
                return {str(noun): int(offset) for noun, offset in json.loads(value).items()}
            except (ValueError, TypeError, AttributeError) as cause:
                raise SchemaError(
                    f"cannot read header {USED_HEADER}={value!r}: expected a JSON object of topic noun → offset; "
                    "something else writes into this topic",
                    reason="malformed_header",
                ) from cause
    return {}


def dead_letter(
    topic: str, event: Event, record: Record | ClaimCheck | None, *, boundary: str, error: str, reason: str
) -> DeadLetter:
    """The dead letter of an event.

    Args:
        topic: full name of its topic.
        record: what was decoded, or the check for a claim that could not be; None if nothing was.
        error: what failed, what was expected, what to do.
    """
    position = event.position
    return DeadLetter(
        dead_letter_id=digest_json([topic, position.partition, position.offset, boundary, reason]),
        boundary=boundary,
        reason=reason,
        message=error,
        topic=topic,
        partition=position.partition,
        offset=position.offset,
        value=event.value,
        at_ms=event.time_ms,
        key=event.key,
        rollout_id=getattr(record, "rollout_id", None),
        call_id=getattr(record, "call_id", None),
    )
