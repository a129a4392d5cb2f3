"""Identities that are pure functions of content: equal content, equal id, whoever computes it and however often."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest_bytes(*parts: bytes) -> str:
    """blake2b-128 over the parts, each preceded by its length. Returns: 32 hex digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def digest_json(*values: Any) -> str:
    """blake2b-128 over JSON values in canonical form (sorted keys, no spaces). Returns: 32 hex digits."""
    return hashlib.blake2b(canonical_json(list(values)), digest_size=16).hexdigest()


def digest_ids(packed: bytes) -> str:
    """blake2b-128 over packed token ids. Returns: 32 hex digits."""
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8. NaN and infinity are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
