"""The object sink on a real S3 server: creation refuses to overwrite, and a restart of the server loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollstream.object_store import open_store
from rollstream.schemas.records import ModelCall
from rollstream.sinks.base import Chunk, LogRecord, SinkBusy, Source
from rollstream.sinks.objects import ObjectSink, list_manifests, read_manifests, read_records
from tests.services.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from tests.unit.sinks.chain import Log, make_log


@pytest.fixture(scope="module")
def log() -> Log:
    return make_log()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path) as server:
        server.create_bucket("rollouts")
        yield server


def _store(server: S3Server):  # type: ignore[no-untyped-def]
    options = {
        "endpoint": server.endpoint,
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
    }
    return open_store("s3://rollouts/team/one", options)


def test_records_come_back_from_a_bucket(server: S3Server, log: Log) -> None:
    """Files and manifests below the prefix."""
    store = _store(server)

    ObjectSink(store).write(log.chunks())

    expected = [r for r in log.records["calls"] if isinstance(r, ModelCall)]
    assert expected == list(read_records(store, ModelCall))
    assert [1] == list_manifests(store)


def test_racing_writers_number_their_manifests_without_a_gap(server: S3Server) -> None:
    """Four writers at once, each with its own partition: every chunk counts once, no number is missing."""
    chunks = [[Chunk(Source("t.x.v1", p), i, i, (LogRecord(i, b"x"),)) for i in range(5)] for p in range(4)]

    def write(mine: list[Chunk]) -> None:
        sink = ObjectSink(_store(server))
        for chunk in mine:
            sink.write([chunk])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, chunks))

    files = [(f.partition, f.first) for manifest in read_manifests(_store(server)) for f in manifest.files]
    assert sorted((p, i) for p in range(4) for i in range(5)) == sorted(files)


def test_server_that_went_away_is_waited_for(server: S3Server, log: Log) -> None:
    """Nothing counts until the manifest is there, and then everything once."""
    options = {
        "endpoint": server.endpoint,
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
    }
    store = open_store("s3://rollouts/team/one", options, retry_timeout_s=0.5)
    chunk = next(c for c in log.chunks() if ".calls." in c.source.topic)
    sink = ObjectSink(store)
    server.kill()

    with pytest.raises(SinkBusy):
        sink.write([chunk])
    server.restart()
    sink.write([chunk])

    assert {chunk.source: chunk.last + 1} == ObjectSink(store).positions()
