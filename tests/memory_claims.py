"""A claim store in memory, which can be down."""

from __future__ import annotations

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

    def put(self, name: str, data: bytes) -> None:
        self._check()
        self.puts += 1
        self.stored[name] = data

    async def put_async(self, name: str, data: bytes) -> None:
        self.put(name, data)

    def get(self, name: str) -> bytes:
        self._check()
        if name not in self.stored:
            raise SchemaError(f"no claim {name!r}", reason="claim_missing")
        return self.stored[name]

    def _check(self) -> None:
        if self.is_down:
            raise BrokerError("the claim store in memory is down", reason="claims_down")
