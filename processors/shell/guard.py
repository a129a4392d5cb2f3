"""Stops a worker whose records keep turning into dead letters: then the deploy is bad, not the data.

What a process buries before it has seen enough to be judged stays uncommitted (`has_judged`). A bad deploy that is restarted
again and again would otherwise move on by a few records with each start, and drain the topic into the dead letters.
"""

from __future__ import annotations

from collections import deque

from rollstream.errors import StageError

_WINDOW = 1_000  # records looked back on
_AT_LEAST = 100  # records seen before a ratio means anything
_OF_THE_DATA = frozenset(
    {"late", "late_for_group", "group_full", "superseded", "no_opening", "already_done", "not_counted"}
)
"""Reasons that one harness can bring about in any number, with every record well understood."""


class DeadLetterGuard:
    """Counts records and dead letters of one process."""

    def __init__(self, limit: float) -> None:
        """Args: limit: largest tolerated part of the last thousand records, 0 to 1."""
        self._limit = limit
        self._seen = 0
        self._dead: deque[int] = deque()

    @property
    def has_judged(self) -> bool:
        """Whether enough records were seen to call the deploy a good one."""
        return self._limit >= 1 or (
            self._seen >= _AT_LEAST and len(self._dead) <= self._limit * min(self._seen, _WINDOW)
        )

    def record(self) -> None:
        """A record was given to the stages."""
        self._seen += 1

    def dead_letter(self, reason: str, example: str) -> None:
        """A record became a dead letter.

        Args: reason: its code; those that say nothing about the deploy do not count. example: what happened, for the message.
        Raises: StageError: reason `too_many_dead_letters`.
        """
        if reason in _OF_THE_DATA:
            return
        self._dead.append(self._seen)
        while self._dead[0] <= self._seen - _WINDOW:
            self._dead.popleft()
        window = min(self._seen, _WINDOW)
        if window >= _AT_LEAST and len(self._dead) > self._limit * window:
            raise StageError(
                f"cannot go on: {len(self._dead)} of the last {window} records became dead letters, expected at most "
                f"processor.dead_letter_limit={self._limit}; look at the last one, fix the deploy, or raise the limit. "
                f"The last one: {example}",
                reason="too_many_dead_letters",
            )
