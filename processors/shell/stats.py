"""Counts of one processor process, read by its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """What happened since the start."""

    events: Counter[str] = field(default_factory=Counter)
    """Topic noun → events read."""
    emitted: Counter[str] = field(default_factory=Counter)
    """Stage → records acknowledged."""
    finished: Counter[str] = field(default_factory=Counter)
    """Stage → events let go of without an output of their own: duplicates, late copies."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Stage → emits dropped because the log already had them."""
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(boundary, reason) → dead letters."""
