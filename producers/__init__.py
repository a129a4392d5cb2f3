"""What writes records: the gateway for model calls, the client for harness authors, and the publishers below both.

Importing this loads neither torch nor Kafka nor Faust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.producers.client import OpenRollout, RolloutClient

__all__ = ["OpenRollout", "RolloutClient"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rollstream.producers import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
