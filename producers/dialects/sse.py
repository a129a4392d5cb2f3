"""Server-sent events, as several protocols write them."""

from __future__ import annotations

from typing import Any

import orjson

MEDIA_TYPE = "text/event-stream; charset=utf-8"
"""Content type of the streams."""
COMMENT = b": working\n\n"
"""An event that every client skips."""


def event(values: Any, name: str | None = None) -> bytes:
    """One event. Args: name: its `event:` line; None for none."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(values) + b"\n\n"
