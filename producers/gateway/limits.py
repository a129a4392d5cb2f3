"""How much the gateway takes on at once, so that neither many clients nor a slow Kafka can fill its memory. Pure.

A call has a place from before its body is read until its answer is sent or its client has left. Where there is no place it is
a 429 with a time to come again; where Kafka owes too many acknowledgements it is a 503, and nothing more is taken on until
it has caught up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollstream.producers.dialects.base import Problem, RequestRefused
from rollstream.producers.gateway.refusals import unavailable

_RETRY_AFTER_S = 1


class Admission:
    """Hands out places for calls.

    Args: max_calls: places. max_backlog: most records that may wait for Kafka's acknowledgement. backlog: how many do now.
    """

    def __init__(self, *, max_calls: int, max_backlog: int, backlog: Callable[[], int]) -> None:
        self._max_calls = max_calls
        self._max_backlog = max_backlog
        self._backlog = backlog
        self.taken = 0
        """Places taken now."""

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one call.

        Raises: RequestRefused: 429 or 503.
        """
        waiting = self._backlog()
        if waiting > self._max_backlog:
            raise unavailable(
                f"{waiting} records wait for Kafka, at most {self._max_backlog} may (gateway.max_backlog); send it again later",
                code="backlog",
            )
        if self.taken >= self._max_calls:
            raise RequestRefused(
                f"{self.taken} calls are being served, at most {self._max_calls} may (gateway.max_calls); send it again later",
                problem=Problem.RATE_LIMITED,
                code="too_many_calls",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
