"""A publisher that keeps records in a list: for tests and for trying a harness without Kafka."""

from __future__ import annotations

import asyncio

from rollstream.errors import BrokerError
from rollstream.producers.base import acknowledged, quiet
from rollstream.schemas.records import Record
from rollstream.schemas.topics import topic_of


class MemoryPublisher:
    """Acknowledges at once, or, while `held`, only when `release` is called; while `broken`, refuses."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Record]] = []
        """Acknowledged records with their topic nouns, in log order."""
        self.held = False
        """True: what is submitted waits, as with a broker that is away."""
        self.broken: str | None = None
        """Not None: `submit` raises a BrokerError with this reason."""
        self._queued: list[tuple[str, Record, asyncio.Future[None]]] = []

    @property
    def problem(self) -> str | None:
        """As in `Publisher`."""
        return self.broken

    @property
    def backlog(self) -> int:
        """As in `Publisher`."""
        return len(self._queued)

    @property
    def queued(self) -> list[Record]:
        """Records submitted and not acknowledged yet, in order."""
        return [record for _, record, _ in self._queued]

    @property
    def records(self) -> list[Record]:
        """Acknowledged records, in log order."""
        return [record for _, record in self.written]

    def submit(self, record: Record, *, noun: str | None = None) -> asyncio.Future[None]:
        """As in `Publisher`."""
        if self.broken is not None:
            raise BrokerError(f"cannot write {type(record).__name__}: this publisher is broken", reason=self.broken)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(quiet)
        self._queued.append((noun or topic_of(type(record)).noun, record, future))
        if not self.held:
            self.release()
        return future

    def release(self) -> None:
        """Acknowledge everything queued, and what comes from now on."""
        self.held = False
        queued, self._queued = self._queued, []
        for noun, record, future in queued:
            self.written.append((noun, record))
            future.set_result(None)

    async def publish(self, record: Record, *, noun: str | None = None, timeout_s: float | None = None) -> None:
        """As in `Publisher`."""
        await acknowledged(self.submit(record, noun=noun), timeout_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        """As in `Publisher`; what is held stays unwritten, as when a broker is away."""
