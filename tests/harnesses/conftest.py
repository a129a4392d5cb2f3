"""The programs, installed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harnesses.install import harness_programs


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with `claude` and `codex`."""
    return harness_programs()
