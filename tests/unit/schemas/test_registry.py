"""The registry of a deployment decides how records are framed."""

from __future__ import annotations

import pytest

from rollstream.errors import SchemaError
from rollstream.schemas.records import RolloutStatus, Terminal
from rollstream.schemas.registry import open_codec

TERMINAL = Terminal("r-1", 0, "g-1", 8, "flight-desk", RolloutStatus.SUCCEEDED, 1_000)


def test_codec_without_a_registry_frames_by_fingerprint() -> None:
    """Nothing has to run."""
    assert open_codec(None, None).encode(TERMINAL)[:2] == b"\xc3\x01"


def test_codec_with_a_registry_asks_it() -> None:
    """A registry that no schema was registered at is told how to get them."""
    with pytest.raises(SchemaError, match="rollstream schemas register"):
        open_codec("mock://registry-of-nothing", None).encode(TERMINAL)
