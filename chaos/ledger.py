"""The ledger of truth, read: what was sent and what the clients were told, group by group.

What a line holds is in `chaos.load`. Reading keeps the place of each line in memory, not the lines.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Line = dict[str, Any]


@dataclass(slots=True)
class AttemptTruth:
    """One attempt of a rollout, as its client saw it; every list in order of the answers."""

    rollout_id: str
    """The rollout."""
    number: int
    """The attempt."""
    opens: list[Line] = field(default_factory=list)
    """Requests to open it."""
    calls: list[Line] = field(default_factory=list)
    """Requests for model calls."""
    events: list[Line] = field(default_factory=list)
    """Requests to write events."""
    finishes: list[Line] = field(default_factory=list)
    """Requests to finish it; all say the same."""

    @property
    def is_opened(self) -> bool:
        """Whether an opening was acknowledged."""
        return any(line["ok"] for line in self.opens)

    @property
    def opened_ms(self) -> int:
        """When it was opened at the earliest."""
        return min(int(line["t0"]) for line in self.opens)

    @property
    def finished(self) -> Line | None:
        """The first acknowledged finish."""
        return next((line for line in self.finishes if line["ok"]), None)


@dataclass(slots=True)
class GroupTruth:
    """A group."""

    group_id: str
    """The group."""
    members: tuple[str, ...]
    """Its rollouts."""
    attempts: dict[tuple[str, int], AttemptTruth] = field(default_factory=dict)
    """What was sent, by rollout and attempt."""

    def last_attempt(self, rollout_id: str) -> AttemptTruth | None:
        """The highest attempt that anybody asked to open."""
        found = [attempt for (name, _), attempt in self.attempts.items() if name == rollout_id]
        return max(found, key=lambda attempt: attempt.number, default=None)

    def lower_attempts(self, attempt: AttemptTruth) -> list[AttemptTruth]:
        """The attempts that this one replaces."""
        return [a for a in self.attempts.values() if a.rollout_id == attempt.rollout_id and a.number < attempt.number]

    def is_superseded(self, attempt: AttemptTruth) -> bool:
        """Whether anybody asked to open a higher attempt."""
        last = self.last_attempt(attempt.rollout_id)
        return last is not None and last.number > attempt.number


def group_truth(lines: list[Line]) -> GroupTruth:
    """The lines of one group, put together; the first one is the group's own."""
    first = lines[0]
    group = GroupTruth(first["g"], tuple(first["members"]))
    parts = {"open": "opens", "call": "calls", "event": "events", "finish": "finishes"}
    for line in lines[1:]:
        if line["k"] in parts:
            key = (line["r"], line["a"])
            attempt = group.attempts.setdefault(key, AttemptTruth(*key))
            getattr(attempt, parts[line["k"]]).append(line)
    return group


class LedgerFile:
    """A ledger. Args: file: its lines; a last line that was cut off is left out."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._places: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self.summary: Line = {}
        """The last line; empty if the load was killed."""
        group_of: dict[str, str] = {}
        at = 0
        with file.open("rb") as lines:
            for raw in lines:
                if raw.endswith(b"\n"):
                    line = orjson.loads(raw)
                    if line["k"] == "end":
                        self.summary = line
                    else:
                        if line["k"] == "group":
                            group_of.update(dict.fromkeys(line["members"], line["g"]))
                        self._places[line["g"] if line["k"] == "group" else group_of[line["r"]]].append(at)
                at += len(raw)

    def group_ids(self) -> list[str]:
        """All groups, sorted."""
        return sorted(self._places)

    def groups(self, group_ids: list[str]) -> Iterator[GroupTruth]:
        """What is known of some groups."""
        with self._file.open("rb") as file:
            for group_id in group_ids:
                lines = []
                for place in self._places[group_id]:
                    file.seek(place)
                    lines.append(orjson.loads(file.readline()))
                yield group_truth(lines)
