"""What a publisher is: the one way a record gets into Kafka.

`submit` queues and returns at once, `publish` also waits for the broker's acknowledgement. Records submitted by one publisher
under one key stand in the log in the order of the calls, also where one of them has to go into the claim store first. A new
publisher is one file here with these four methods; the contract tests in `tests/unit/producers/test_publishers.py` hold for each.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollstream.errors import BrokerError
from rollstream.schemas.records import Record


class Submitted(asyncio.Future[None]):
    """A submitted record: done once the broker has acknowledged it."""

    waits_for: BrokerError | None = None
    """Why it was not given to Kafka yet, where that is known: claim store or schema registry are down. It is still queued."""


class Publisher(Protocol):
    """Writes records; used from one event loop."""

    def submit(self, record: Record, *, noun: str | None = None) -> asyncio.Future[None]:
        """Queue a record.

        Args: noun: topic to write to where it is not the record's own (a terminal in `calls`).

        Returns: done when the broker has acknowledged; its exception is a BrokerError if it never will.

        Raises: BrokerError: reason `queue_full`, `too_large`, `refused`, `fatal` or `closed`; nothing was queued.
        """

    async def publish(self, record: Record, *, noun: str | None = None, timeout_s: float | None = None) -> None:
        """Queue a record and wait for the acknowledgement.

        Raises: BrokerError: as `submit`, or reason `ack_timeout`, `claims_down`, `registry_down` or `not_registered`; then the
            record is still queued and may arrive later.
        """

    async def close(self, timeout_s: float = 10.0) -> None:
        """Wait for what is queued, at most this long, and stop."""

    @property
    def backlog(self) -> int:
        """How many records wait for their acknowledgement."""

    @property
    def problem(self) -> str | None:
        """Why this publisher will never write again; None while it may."""


async def acknowledged(future: asyncio.Future[None], timeout_s: float | None) -> None:
    """Wait for a submitted record's acknowledgement, without taking the record back if it does not come.

    Raises: BrokerError: reason `ack_timeout`, or why the claim store or the registry does not answer, where that is what it waits
        for; or why the broker refused.
    """
    if not future.done():
        await asyncio.wait((future,), timeout=timeout_s)
    if not future.done():
        if isinstance(future, Submitted) and future.waits_for is not None:
            raise future.waits_for
        raise BrokerError(
            f"Kafka did not acknowledge a record within {timeout_s:g} s; look at the broker, or raise "
            "gateway.ack_timeout_s. The record is still queued",
            reason="ack_timeout",
        )
    future.result()


def quiet(future: asyncio.Future[None]) -> None:
    """Look at a future's exception, so that nobody complains that nobody did; a done-callback."""
    if not future.cancelled():
        future.exception()
