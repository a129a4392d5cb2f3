"""Gets the two records of a call into Kafka: intent before the engine is asked, outcome before anybody acts on the answer.

Where Kafka does not acknowledge in time, what is known stays queued and is made harmless: an intent is followed by the outcome
`rejected`, an outcome by a `CallDelivery` (none, `ack_timeout`); outcome and correction also go to the spool, if there is one.
Used by the gateway and by `direct.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollstream.errors import BrokerError
from rollstream.producers.base import Publisher, acknowledged
from rollstream.producers.draft import correction
from rollstream.producers.spool import Spool
from rollstream.schemas.records import CallDelivery, CallStarted, Delivery, ModelCall, Record

_log = logging.getLogger(__name__)


class CallRecorder:
    """Writes calls.

    Args:
        spool: None keeps nothing on disk: what Kafka has not acknowledged when the process ends is lost, and its call is `lost`.
        on_spooled: told of each record that goes to the spool.
    """

    def __init__(
        self,
        publisher: Publisher,
        spool: Spool | None,
        *,
        ack_timeout_s: float,
        now_ms: Callable[[], int],
        on_spooled: Callable[[], None] = lambda: None,
    ) -> None:
        self._publisher = publisher
        self._spool = spool
        self._ack_timeout_s = ack_timeout_s
        self._now_ms = now_ms
        self._on_spooled = on_spooled

    async def intend(self, started: CallStarted, rejected: Callable[[str], ModelCall]) -> None:
        """Write an intent.

        Args: rejected: makes the outcome of a call that comes to nothing, given why.

        Raises: BrokerError: it was not acknowledged. The outcome `rejected` is queued behind it, so that an intent that arrives
            late does not stand alone; neither is spooled, for nothing was sampled.
        """
        future = self._publisher.submit(started)
        try:
            await acknowledged(future, self._ack_timeout_s)
        except BrokerError as error:
            self._publisher.submit(rejected(str(error)))
            raise

    async def write(self, call: ModelCall) -> None:
        """Write an outcome.

        Raises: BrokerError: Kafka did not acknowledge it in time; it and its correction are queued and in the spool.
        """
        future = None
        try:
            future = self._publisher.submit(call)
            await acknowledged(future, self._ack_timeout_s)
        except BrokerError:
            record = correction(call, Delivery.NONE, "ack_timeout", self._now_ms())
            # Before the disk, which may refuse: where the call arrives late, this must follow it.
            corrected = self._submit_if_possible(record)
            await self._spool_behind(call, future)
            await self._spool_behind(record, corrected)
            raise

    async def correct(self, record: CallDelivery) -> None:
        """Write what a client did not get. Where Kafka does not acknowledge it in time it stays queued."""
        try:
            await self._publisher.publish(record, timeout_s=self._ack_timeout_s)
        except BrokerError:
            _log.warning("the correction of call %s is queued only", record.call_id, exc_info=True)

    def _submit_if_possible(self, record: Record) -> asyncio.Future[None] | None:
        try:
            return self._publisher.submit(record)
        except BrokerError:
            return None

    async def _spool_behind(self, record: Record, future: asyncio.Future[None] | None) -> None:
        """Put a queued record on disk until its acknowledgement comes; without a future, until the next start."""
        if self._spool is None:
            return
        file = await asyncio.to_thread(self._spool.keep, record)
        self._on_spooled()
        _log.warning("Kafka does not acknowledge; %s is kept in %s", type(record).__name__, file)
        if future is not None:
            self._spool.remove_when_done(file, future)
