"""Tells a worker whose instance id was taken by another process from one whose session merely ended.

aiokafka joins with a static instance id but does not send it with heartbeats and commits, so a broker tells both the same:
unknown member. It then joins anew under the same id, which throws the other process out, and so on in turn. A worker whose
last answered request is younger than the session timeout cannot have been expired: it was replaced, and must stop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollstream.errors import BrokerError

_UNKNOWN_MEMBER, _FENCED_INSTANCE = 25, 82  # Kafka's error codes
_OF_MEMBERS = ("HeartbeatResponse", "OffsetCommitResponse", "SyncGroupResponse")


class Membership:
    """Looks at what the group's coordinator answers.

    Args:
        send: sends a request to the coordinator.
        instance_id: of this process.
        session_timeout_s: after this long without a request a member is expired.
        on_fenced: told that the process must stop.
    """

    def __init__(
        self,
        send: Callable[[Any], Awaitable[Any]],
        instance_id: str,
        session_timeout_s: float,
        on_fenced: Callable[[BaseException], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._instance_id = instance_id
        self._session_timeout_s = session_timeout_s
        self._on_fenced = on_fenced
        self._clock = clock
        self._heard_at: float | None = None

    async def send(self, request: Any) -> Any:
        """Send a request and look at the answer.

        Raises: BrokerError: reason `fenced`: another process runs under this instance id.
        """
        asked_at = self._clock()  # when it is read says nothing: a worker that was frozen finds an old answer
        response = await self._send(request)
        codes = _error_codes(response)
        now = self._clock()
        if _FENCED_INSTANCE in codes or (_UNKNOWN_MEMBER in codes and self._is_alive(response, now)):
            error = BrokerError(
                f"cannot go on: another process has joined the group as instance {self._instance_id!r}; run one process "
                "for each processor.instance_id",
                reason="fenced",
            )
            await self._on_fenced(error)
            raise error
        if codes <= {0}:
            self._heard_at = asked_at
        return response

    def _is_alive(self, response: Any, now: float) -> bool:
        """Whether the broker cannot have taken this member for dead."""
        is_of_member = type(response).__name__.startswith(_OF_MEMBERS)
        return is_of_member and self._heard_at is not None and now - self._heard_at < self._session_timeout_s


def _error_codes(response: Any) -> set[int]:
    code = getattr(response, "error_code", None)
    if code is not None:
        return {code}
    return {code for _, partitions in getattr(response, "topics", ()) for _, code, *_ in partitions}
