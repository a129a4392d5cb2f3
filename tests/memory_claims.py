"""A claim store in memory, which can be down."""

from __future__ import annotations

import asyncio

from rollstream.errors import BrokerError, SchemaError


class MemoryClaims:
    """Keeps claims in a dict."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        """Content by name."""
        self.puts = 0
        """How often something was put."""
        self.is_down = False
        """True: nothing can be put or got."""
        self.is_slow: asyncio.Event | None = None
        """Not None: whoever does not block waits for it; whoever blocks fails, since nothing would ever set it."""

    def put(self, name: str, data: bytes) -> None:
        self._may_block()
        self._put(name, data)

    def _put(self, name: str, data: bytes) -> None:
        self._check()
        self.puts += 1
        self.stored[name] = data

    async def put_async(self, name: str, data: bytes) -> None:
        await self._passed()
        self._put(name, data)

    def get(self, name: str) -> bytes:
        self._may_block()
        return self._get(name)

    def _get(self, name: str) -> bytes:
        self._check()
        if name not in self.stored:
            raise SchemaError(f"no claim {name!r}", reason="claim_missing")
        return self.stored[name]

    async def get_async(self, name: str) -> bytes:
        await self._passed()
        return self._get(name)

    async def _passed(self) -> None:
        if self.is_slow is not None:
            await self.is_slow.wait()

    def _may_block(self) -> None:
        if self.is_slow is not None and not self.is_slow.is_set():
            raise AssertionError("the claim store is slow, and the event loop would wait for it")

    def _check(self) -> None:
        if self.is_down:
            raise BrokerError("the claim store in memory is down", reason="claims_down")
