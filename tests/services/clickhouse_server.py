"""ClickHouse's HTTP interface over chDB, with faults on request: `python -m tests.services.clickhouse_server FOLDER PORT`.

What it is: the real engine (chDB is ClickHouse as a library) on a folder, so tables, deduplication tokens, materialized views
and FINAL are ClickHouse's own. Around it a small HTTP server that speaks what clickhouse-connect uses: queries with FORMAT
in the body, in `query` or in a form, inserts with an Arrow or Native body (plain, lz4 or gzip), settings and parameters of a
query in the URL, `database`, `/ping`, and errors with `X-ClickHouse-Exception-Code`.

What it is not: ClickHouse's own server. No users and passwords (all are let in), no TLS, no sessions, no replication, no
keeper, no limits on parts or queries; an answer is made whole before it is sent, and never compressed. So what ClickHouse does
by itself under load, such as refusing an insert for too many parts, is injected here and not provoked.

Control routes: `POST /_faults` adds a fault (`http_faults.Fault`), `GET /_faults` says what is waiting and how many
were injected, `DELETE /_faults` takes all of them back and lets go of what hangs.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from email.parser import BytesParser
from email.policy import HTTP
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import chdb
import lz4.frame

from tests.services.http_faults import KINDS, Fault, Faults, FaultyHandler

# What the HTTP interface takes itself; everything else in the URL is a setting of the query, or a parameter of it.
_NOT_SETTINGS = frozenset(
    {
        "database",
        "query",
        "query_id",
        "session_id",
        "session_timeout",
        "session_check",
        "wait_end_of_query",
        "compress",
        "decompress",
        "buffer_size",
        "enable_http_compression",
        "default_format",
        "user",
        "password",
        "quota_key",
        "role",
        "client_protocol_version",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "cancel_http_readonly_queries_on_client_close",
    }
)
_INSERT_FORMAT = re.compile(rb"^\s*INSERT\s+INTO\s[^\n]*?\bFORMAT\s+(\w+)\s*", re.IGNORECASE)
_TRAILING_FORMAT = re.compile(r"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
_CODE = re.compile(r"Code: (\d+)")
_STATUS = {60: 404, 81: 404, 62: 400, 202: 429, 159: 408}


class Engine:
    """chDB on a folder. Every request has a connection of its own, so no setting outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bodies = tempfile.mkdtemp(prefix="bodies-", dir=folder.parent)
        self._numbers = itertools.count()
        self._connection = chdb.connect(str(folder))  # keeps the engine open
        self.timezone = self._connection.query("SELECT timezone()", "TabSeparated").bytes().decode().strip()

    def run(self, statement: str, body: bytes, url: Mapping[str, str]) -> tuple[bytes, str]:
        """Run a statement.

        Args: body: rows of an insert. url: database, settings and parameters.
        Returns: the answer and its format. Raises: chdb.ChdbError: the engine's error.
        """
        settings = {k: v for k, v in url.items() if k not in _NOT_SETTINGS and not k.startswith("param_")}
        parameters = {k.removeprefix("param_"): v for k, v in url.items() if k.startswith("param_")}
        connection = chdb.connect(str(self._folder))
        try:
            if database := url.get("database"):
                connection.query(f"USE `{database}`", "Null")
            if settings:
                connection.query("SET " + ", ".join(f"{k} = {_quoted(v)}" for k, v in settings.items()), "Null")
            if body:
                return self._insert(connection, statement, body), ""
            found = _TRAILING_FORMAT.search(statement)
            answer_format = found.group(1) if found else url.get("default_format", "TabSeparated")
            result = connection.query(statement, answer_format, params=parameters or None)
            return result.bytes() or b"", answer_format if _answers(statement) else ""
        finally:
            connection.close()

    def _insert(self, connection: chdb.state.sqlitelike.Connection, statement: str, body: bytes) -> bytes:
        path = Path(self._bodies, str(next(self._numbers)))
        path.write_bytes(body)
        try:
            head, name = (
                re.split(r"\bFORMAT\b", statement, flags=re.IGNORECASE)[0],
                _TRAILING_FORMAT.search(statement),
            )
            connection.query(
                f"{head} FROM INFILE {_quoted(str(path))} FORMAT {name.group(1) if name else 'Values'}", "Null"
            )
        finally:
            path.unlink()
        return b""


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _answers(statement: str) -> bool:
    return statement.lstrip().split(None, 1)[0].upper() in (
        "SELECT",
        "WITH",
        "SHOW",
        "DESCRIBE",
        "DESC",
        "EXISTS",
        "EXPLAIN",
    )


def _split_insert(body: bytes) -> tuple[bytes, bytes]:
    """Statement and rows, where both stand in the body."""
    found = _INSERT_FORMAT.match(body[:65536])
    if found is None or found.group(1).upper() == b"VALUES":
        return body, b""
    return body[: found.end(1)], body[found.end() :]


def _form(content_type: str, body: bytes) -> dict[str, str]:
    """The fields of a form, which clients send where query and parameters are too long for a URL."""
    form = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True).decode()
        for part in form.iter_parts()
    }


def _decompressed(body: bytes, encoding: str) -> bytes:
    match encoding:
        case "lz4":
            return bytes(lz4.frame.decompress(body))
        case "gzip":
            return gzip.decompress(body)
        case "" | "identity":
            return body
    raise ValueError(f"cannot read a body with Content-Encoding {encoding!r}: expected lz4, gzip or none")


class Handler(FaultyHandler):
    """One connection of a client."""

    engine: Engine

    def do_GET(self) -> None:  # noqa: N802
        """Queries in the URL, `/ping`, and the faults."""
        path = urlsplit(self.path).path
        if path == "/ping":
            self.answer(200, b"Ok.\n")
        elif path == "/_faults":
            self.answer(200, json.dumps(self.faults.report()).encode())
        else:
            self.do_POST()

    def do_DELETE(self) -> None:  # noqa: N802
        """Take the faults back."""
        self.faults.clear()
        self.answer(200, b"")

    def do_POST(self) -> None:  # noqa: N802
        """Statements, and new faults."""
        parts = urlsplit(self.path)
        url = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = _decompressed(self.body(), self.headers.get("Content-Encoding", ""))
        if parts.path == "/_faults":
            self._add_fault(body)
            return
        if self.headers.get_content_type() == "multipart/form-data":
            url |= _form(self.headers["Content-Type"], body)
            body = b""
        statement, rows = (url["query"].encode(), body) if url.get("query") else _split_insert(body)
        self.serve(statement.decode(), lambda: self._run(statement.decode(), rows, url))

    def refusal(self, fault: Fault) -> tuple[int, bytes, Mapping[str, str]]:
        """As ClickHouse says it, or as a proxy does."""
        if not fault.exception_code:
            return fault.status, b"injected", {}
        return _error(fault.status, fault.exception_code, f"Code: {fault.exception_code}. DB::Exception: injected")

    def _add_fault(self, body: bytes) -> None:
        asked = json.loads(body)
        unknown = set(asked) - {field.name for field in fields(Fault)}
        if unknown or asked.get("kind") not in KINDS:
            self.answer(400, f"cannot inject {asked}: unknown {sorted(unknown)}, expected one of {KINDS}".encode())
            return
        self.faults.add(Fault(**asked))
        self.answer(200, b"")

    def _run(self, statement: str, rows: bytes, url: Mapping[str, str]) -> tuple[int, bytes, Mapping[str, str]]:
        try:
            answer, answer_format = self.engine.run(statement, rows, url)
        except (chdb.ChdbError, RuntimeError) as error:
            found = _CODE.search(str(error))
            code = int(found.group(1)) if found else 1002
            return _error(_STATUS.get(code, 500), code, str(error))
        headers = {"X-ClickHouse-Timezone": self.engine.timezone, "X-ClickHouse-Query-Id": url.get("query_id", "")}
        if answer_format:
            headers["X-ClickHouse-Format"] = answer_format
        return 200, answer, headers


def _error(status: int, code: int, text: str) -> tuple[int, bytes, Mapping[str, str]]:
    return status, text.encode(), {"X-ClickHouse-Exception-Code": str(code)}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients come and go; what they did not read is theirs to ask for again."""


def main() -> None:
    """Serve a folder on a port of the loopback address until a signal ends it."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    Handler.engine, Handler.faults = Engine(folder), Faults()
    with _Server(("127.0.0.1", port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(0)
