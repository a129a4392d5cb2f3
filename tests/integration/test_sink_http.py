"""The ClickHouse sink over HTTP, against a small stand-in: what it sends, and what it makes of failures.

The stand-in keeps bodies and tokens and answers as told; what ClickHouse does with them is proven on the embedded engine,
which runs the same code.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pytest

from rollstream.errors import SinkError
from rollstream.sinks.base import Chunk, SinkBusy
from rollstream.sinks.clickhouse import ClickHouseSink
from rollstream.sinks.connect import connect
from tests.services.http_faults import FaultyHandler
from tests.unit.sinks.chain import make_log


@dataclass
class Received:
    """One insert."""

    query: str
    settings: dict[str, list[str]]
    body: bytes


@dataclass
class StandIn:
    """What the server was sent, and what it answers next to an insert."""

    url: str = ""
    inserts: list[Received] = field(default_factory=list)
    answers: deque[tuple[int, str, bool]] = field(default_factory=deque)
    """Status, text, and whether the connection is dropped instead."""


@pytest.fixture
def server() -> Iterator[StandIn]:
    state = StandIn()

    class Handler(FaultyHandler):
        def do_POST(self) -> None:  # noqa: N802
            query = parse_qs(urlsplit(self.path).query)
            body = self.body()
            sql = query.get("query", [""])[0] or body.decode(errors="replace")
            if sql.lstrip().upper().startswith("INSERT"):
                state.inserts.append(Received(sql, query, body))
                status, text, drops = state.answers.popleft() if state.answers else (200, "", False)
                if drops:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._answer(status, text.encode())
            else:
                self._answer(200, _answer_to(sql))

        def do_GET(self) -> None:  # noqa: N802
            self.do_POST()

        def _answer(self, status: int, body: bytes) -> None:
            code = body.partition(b"Code: ")[2].partition(b".")[0].decode() or "0"
            self.answer(status, body, {} if status == 200 else {"X-ClickHouse-Exception-Code": code})

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    state.url = f"http://writer:secret@127.0.0.1:{http.server_port}/rl"
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


def _answer_to(sql: str) -> bytes:
    """Enough for the client to connect: version and time zone, no settings."""
    if "version()" in sql:
        return b"26.9.1.1\tUTC\n"
    return b""


@pytest.fixture(scope="module")
def chunk() -> Chunk:
    return next(chunk for chunk in make_log().chunks() if ".calls." in chunk.source.topic)


@pytest.fixture
def sink(server: StandIn) -> Iterator[ClickHouseSink]:
    sink = ClickHouseSink(connect(server.url, migrate=False))
    yield sink
    sink.close()


def _tokens(server: StandIn) -> list[str]:
    return [received.settings["insert_deduplication_token"][0] for received in server.inserts]


def test_insert_goes_out_as_arrow_with_its_settings(server: StandIn, sink: ClickHouseSink, chunk: Chunk) -> None:
    """One insert a table, the ledger last, each with a token and without the server's own batching."""
    sink.write([chunk])

    tables = [received.query.split()[2].strip("`") for received in server.inserts]
    assert "ingest_ledger" == tables[-1].rpartition(".")[2].strip("`")
    assert len(tables) == len(set(tables)) == 5
    for received in server.inserts:
        assert "FORMAT Arrow" in received.query
        assert ["0"] == received.settings["async_insert"]
        assert ["rl"] == received.settings["database"]
    assert len(set(_tokens(server))) == 5


@pytest.mark.parametrize(
    "answer",
    [
        (500, "Code: 252. DB::Exception: Too many parts (TOO_MANY_PARTS)", False),
        (500, "Code: 241. DB::Exception: Memory limit exceeded (MEMORY_LIMIT_EXCEEDED)", False),
        (500, "Code: 202. DB::Exception: Too many simultaneous queries (TOO_MANY_SIMULTANEOUS_QUERIES)", False),
    ],
)
def test_full_server_is_waited_for_and_gets_the_same_tokens(
    server: StandIn, sink: ClickHouseSink, chunk: Chunk, answer: tuple[int, str, bool]
) -> None:
    """The second write repeats the first one's token, so that rows that did arrive are dropped."""
    server.answers.append(answer)

    with pytest.raises(SinkBusy):
        sink.write([chunk])
    first = _tokens(server)[0]
    server.inserts.clear()
    sink.write([chunk])

    assert first == _tokens(server)[0]
    assert len(server.inserts) == 5


def test_lost_answer_is_repeated_with_the_same_token(server: StandIn, sink: ClickHouseSink, chunk: Chunk) -> None:
    """A dropped connection leaves open whether the rows arrived; the token makes the question harmless."""
    server.answers.append((0, "", True))

    try:
        sink.write([chunk])
    except SinkBusy:
        sink.write([chunk])

    same = [r for r in server.inserts if r.query == server.inserts[0].query]
    assert len(same) == 2
    assert same[0].settings["insert_deduplication_token"] == same[1].settings["insert_deduplication_token"]
    assert same[0].body == same[1].body


def test_wrong_table_is_an_error_that_stops(server: StandIn, sink: ClickHouseSink, chunk: Chunk) -> None:
    """Waiting would not help, and nothing was noted as stored."""
    server.answers.append(
        (404, "Code: 60. DB::Exception: Unknown table expression identifier (UNKNOWN_TABLE)", False)
    )

    with pytest.raises(SinkError, match="see whether the tables are those of sinks/ddl") as caught:
        sink.write([chunk])

    assert not isinstance(caught.value, SinkBusy)
    assert not any("ingest_ledger" in received.query for received in server.inserts)


def test_body_is_an_arrow_file_of_the_rows(server: StandIn, sink: ClickHouseSink, chunk: Chunk) -> None:
    """What goes over the wire are the columns of the table."""
    sink.write([chunk])

    (calls,) = [received for received in server.inserts if "model_calls" in received.query]
    start = calls.body.index(b"ARROW1")
    table = pa.ipc.open_file(pa.py_buffer(calls.body[start:])).read_all()
    assert {"call_id", "prompt_suffix", "output_ids", "_offset"} <= set(table.column_names)
    assert table.num_rows > 5


def test_server_that_is_not_there_says_where(server: StandIn) -> None:
    """Host and port are in the message; the password is not."""
    with pytest.raises(SinkError, match=r"cannot connect to ClickHouse at 127.0.0.1:1") as caught:
        connect("http://writer:secret@127.0.0.1:1/rl")

    assert "secret" not in str(caught.value)
