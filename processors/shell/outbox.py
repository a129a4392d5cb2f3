"""The one sender of a process: messages in order, a bounded number and size of them ahead of the broker's acknowledgements.

What a message names in the claim store is stored before the message is sent; meanwhile what comes after it waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from rollstream.errors import BrokerError, RollstreamError, StageError, boundary
from rollstream.processors.shell.messages import Outgoing
from rollstream.processors.shell.transport import Producer
from rollstream.schemas.codec import Claim

_MOST = 2_000  # messages waiting or on their way; what a batch brings may go over it once
_MOST_BYTES = 32_000_000  # the same for their values and claims; a rollout may have megabytes


class Outbox:
    """Messages to send. Used from one event loop."""

    def __init__(self, fail: Callable[[BaseException], None], store: Callable[[Claim], Awaitable[None]]) -> None:
        """Args: fail: told what made a message fail; the process cannot go on. store: puts a claim into its store."""
        self._fail = fail
        self._store = store
        self._waiting: deque[Outgoing] = deque()
        self._in_flight = 0
        self._waiting_bytes = 0
        self._in_flight_bytes = 0
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def has_room(self) -> bool:
        """Whether it can take what more records bring."""
        return self._has_room.is_set()

    async def room(self) -> None:
        """Wait for room."""
        await self._has_room.wait()

    def add(self, messages: Iterable[Outgoing]) -> None:
        """Queue messages."""
        for outgoing in messages:
            self._waiting.append(outgoing)
            self._waiting_bytes += outgoing.size_bytes
        self._changed()

    def clear(self) -> None:
        """Forget what was not given to the producer yet."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._changed()

    async def send_all(self, producer: Producer) -> None:
        """Send what is added, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting and self._in_flight < _MOST and self._in_flight_bytes < _MOST_BYTES:
                outgoing = self._waiting.popleft()
                m = outgoing.message
                self._waiting_bytes -= outgoing.size_bytes
                self._in_flight += 1
                self._in_flight_bytes += outgoing.size_bytes
                if m.claim is not None:
                    await self._store(m.claim)
                with boundary(BrokerError, _what(outgoing), reason="no_ack"):
                    sent = await producer.send_ms(
                        m.topic, m.key, m.value, outgoing.partition, m.timestamp_ms, m.headers
                    )
                asyncio.ensure_future(sent).add_done_callback(partial(self._acknowledged, outgoing))

    def _acknowledged(self, outgoing: Outgoing, sent: asyncio.Future[Any]) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= outgoing.size_bytes
        self._changed()
        if sent.cancelled():
            return
        if (error := sent.exception()) is not None:
            self._fail(BrokerError(f"cannot {_what(outgoing)}: {error!r}", reason="no_ack"))
            return
        try:
            with boundary(StageError, f"finish what was written to {outgoing.message.topic}", reason="stage_failed"):
                outgoing.on_ack(outgoing, sent.result().offset)
        except RollstreamError as broken:  # in a callback nobody else would see it
            self._fail(broken)

    def _changed(self) -> None:
        self._wake.set()
        is_small = self._waiting_bytes + self._in_flight_bytes < _MOST_BYTES
        if is_small and len(self._waiting) + self._in_flight < _MOST:
            self._has_room.set()
        else:
            self._has_room.clear()


def _what(outgoing: Outgoing) -> str:
    message = outgoing.message
    return (
        f"write {len(message.value)} bytes with key {message.key!r} to {message.topic} (one that is too large needs a "
        "larger max.message.bytes of the topic)"
    )
