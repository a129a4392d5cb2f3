"""Addresses of ClickHouse: what they say reaches the client, and a wrong one opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rollstream.errors import SinkError
from rollstream.sinks.connect import connect


def test_user_and_password_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password with signs that an address cannot hold is percent-encoded in it."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("clickhouse_connect.get_client", lambda **given: asked.update(given) or MagicMock())

    connect("http://me%40home:p%40ss%2Fword@store:8123/db", migrate=False)

    assert ("me@home", "p@ss/word", "store", 8123) == tuple(
        asked[k] for k in ("username", "password", "host", "port")
    )


def test_reader_makes_no_folder_that_is_not_there(tmp_path: Path) -> None:
    """An audit of a misspelled folder says so, and leaves nothing behind."""
    folder = tmp_path / "typo"

    with pytest.raises(SinkError, match="there is no such folder"):
        connect(f"chdb://{folder}", migrate=False)

    assert not folder.exists()
