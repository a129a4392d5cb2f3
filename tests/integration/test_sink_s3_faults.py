"""The object sink under faults: a real S3 server behind a proxy that fails when it is told to.

What is checked is what a reader sees: every offset is in exactly one file that a manifest names.
"""

from __future__ import annotations

import http.client
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest

from rollstream.object_store import open_store
from rollstream.process import ServiceProcess
from rollstream.schemas.records import RECORDS
from rollstream.sinks.base import Chunk, SinkBusy
from rollstream.sinks.objects import ObjectSink, read_manifests, read_records
from tests.services.http_faults import Fault, Faults, FaultyHandler
from tests.services.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from tests.unit.sinks.chain import ROOT, Log, make_log

TRIES = 60
WAIT_S = 60.0
STEPS = ("PUT /rollouts/data/", "PUT /rollouts/_manifest/", "GET /rollouts?list", "GET /rollouts/_manifest/")
"""What a sink asks of S3 from its start until a chunk is stored."""
FAULTS: dict[str, dict[str, Any]] = {
    "429": {"kind": "status", "status": 429},
    "500": {"kind": "status", "status": 500},
    "503": {"kind": "status", "status": 503},
    "reset before": {"kind": "reset_before"},
    "reset after": {"kind": "reset_after"},
}


class _Handler(FaultyHandler):
    """Hands a request on to the S3 server as it is; the signature covers the host, so that stays, too."""

    port: int

    def _hand_on(self) -> None:
        body = self.body()
        self.serve(f"{self.command} {self.path}", lambda: self._ask(body))

    def _ask(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        found = answer.read()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
        upstream.close()
        return answer.status, found, headers

    do_GET = do_PUT = _hand_on  # noqa: N815 - the names that the standard library looks for


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that went away is what these tests are about."""


@dataclass
class FaultyS3:
    """An S3 server, and how it fails."""

    options: dict[str, str]
    faults: Faults

    def store(self, retry_timeout_s: float = 0.2) -> Any:
        """The bucket; what is tried again is tried again by the sink's loop, not by the client."""
        return open_store("s3://rollouts", self.options, retry_timeout_s=retry_timeout_s)


@pytest.fixture(scope="module")
def log() -> Log:
    return make_log()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[FaultyS3]:
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("rollouts")
        faults = Faults()
        handler = type("Handler", (_Handler,), {"port": server.port, "faults": faults})
        proxy = _Server(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{proxy.server_port}"
        keys = {"region": REGION, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
        yield FaultyS3({"endpoint": endpoint, **keys}, faults)
        faults.clear()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def _patiently(do: Callable[[], Any]) -> Any:
    for _ in range(TRIES):
        try:
            return do()
        except SinkBusy:
            continue
    raise AssertionError(f"still busy after {TRIES} tries")


def _write_all(sink: ObjectSink, chunks: list[Chunk]) -> None:
    _patiently(sink.positions)
    for chunk in chunks:
        _patiently(lambda chunk=chunk: sink.write([chunk]))  # type: ignore[misc]


def _assert_holds_once(s3: FaultyS3, log: Log) -> None:
    store = s3.store(10)
    for record in RECORDS.values():
        expected = [repr(r) for records in log.records.values() for r in records if type(r) is record]
        assert sorted(expected) == sorted(map(repr, read_records(store, record)))
    named = Counter(
        (file.topic, file.partition, offset, file.record)
        for manifest in read_manifests(store)
        for file in manifest.files
        for offset in range(file.first, file.last + 1)
    )
    assert set(named.values()) == {1}
    assert {chunk.source: chunk.last + 1 for chunk in log.chunks()} == ObjectSink(store).positions()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_step_leaves_each_offset_in_one_file_that_counts(s3: FaultyS3, log: Log, fault: str) -> None:
    """Each step fails three times, before and behind what it did."""
    for step in STEPS:
        s3.faults.add(Fault(match=step, count=3, **FAULTS[fault]))

    first, *rest = log.chunks(20)
    _write_all(ObjectSink(s3.store()), [first])
    _write_all(ObjectSink(s3.store()), rest)

    assert [] == s3.faults.report()["waiting"]
    _assert_holds_once(s3, log)


def test_replay_from_the_beginning_adds_no_file(s3: FaultyS3, log: Log) -> None:
    """A sink that never asked for positions writes the whole log again, cut elsewhere."""
    _write_all(ObjectSink(s3.store()), log.chunks(12))
    before = len(list(read_manifests(s3.store(10))))

    again = ObjectSink(s3.store())
    rows = [_patiently(lambda chunk=chunk: again.write([chunk])) for chunk in log.chunks(17)]  # type: ignore[misc]

    assert sum(rows) == 0
    assert before == len(list(read_manifests(s3.store(10))))
    _assert_holds_once(s3, log)


def test_two_owners_of_the_same_partitions_leave_each_offset_in_one_file(s3: FaultyS3, log: Log) -> None:
    """A zombie and its successor race for every manifest number, with other cuts, while requests fail."""
    rng = random.Random(7)
    for _ in range(20):
        s3.faults.add(Fault(match=rng.choice(STEPS), skip=rng.randrange(4), **rng.choice(list(FAULTS.values()))))

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(_write_all, ObjectSink(s3.store()), log.chunks(size)) for size in (11, 17)]
        for future in done:
            future.result(2 * WAIT_S)
    s3.faults.clear()

    _assert_holds_once(s3, log)


def test_sink_killed_between_file_and_manifest_leaves_an_orphan_that_does_no_harm(
    s3: FaultyS3, log: Log, tmp_path: Path
) -> None:
    """SIGKILL when the data files are there and the manifest is not: the next sink cuts differently, each offset counts once."""
    s3.faults.add(Fault("hang", match="PUT /rollouts/_manifest/", skip=2))
    code = (
        "from rollstream.object_store import open_store\n"
        "from rollstream.sinks.objects import ObjectSink\n"
        "from tests.unit.sinks.chain import make_log\n"
        f"sink = ObjectSink(open_store('s3://rollouts', {s3.options!r}))\n"
        "for chunk in make_log().chunks(12):\n"
        "    sink.write([chunk])\n"
    )
    env = {"PYTHONPATH": str(ROOT)}
    with ServiceProcess("sink", [sys.executable, "-c", code], log_file=tmp_path / "sink.log", env=env) as sink:
        sink.wait_until(lambda: not s3.faults.report()["waiting"], WAIT_S, "it hangs at its third manifest")
        sink.kill()
    s3.faults.clear()

    _write_all(ObjectSink(s3.store()), log.chunks(17))

    store = s3.store(10)
    stored = {str(entry["path"]) for page in obstore.list(store, "data/") for entry in page}
    named = {file.path for manifest in read_manifests(store) for file in manifest.files}
    assert named < stored
    _assert_holds_once(s3, log)
