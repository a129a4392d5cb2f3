"""Identifiers that producers make."""

from __future__ import annotations

import os


def new_id(kind: str, now_ms: int) -> str:
    """An identifier that nobody else makes; those made later sort behind."""
    return f"{kind}-{now_ms:012x}{os.urandom(8).hex()}"
