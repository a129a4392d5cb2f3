"""One embedded engine for all tests of this process (chDB opens one folder a process), a database for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from clickhouse_connect.driver.client import Client

from rollstream.sinks.connect import connect
from tests.unit.sinks.chain import Log, make_log

_numbers = itertools.count()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the engine's folder."""
    return f"chdb://{tmp_path_factory.mktemp('clickhouse')}"


@pytest.fixture
def client(engine: str) -> Iterator[Client]:
    """A client of an empty database."""
    client = connect(f"{engine}?database=test_{next(_numbers)}")
    yield client
    client.command(f"DROP DATABASE {client.database}")


@pytest.fixture(scope="session")
def log() -> Log:
    """A whole run; not to be changed."""
    return make_log()
