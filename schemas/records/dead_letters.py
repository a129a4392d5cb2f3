"""What no stage could use: kept whole, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be used, with its bytes."""

    dead_letter_id: str
    """Digest of source position, boundary and reason."""
    boundary: str
    """Where it failed: `decode`, `join`, `group`, `score`, `reward`, `credit`, `build`, `sink`."""
    reason: str
    """Reason code."""
    message: str
    """What failed, what was expected, what to do."""
    topic: str
    """Source topic."""
    partition: int
    """Source partition."""
    offset: int
    """Source offset."""
    value: bytes
    """The original bytes."""
    at_ms: int
    """Timestamp of the source record."""
    key: bytes | None = None
    """The original key."""
    rollout_id: str | None = None
    """The rollout, if it could be read."""
    call_id: str | None = None
    """The call, if it could be read."""
