"""HTTP servers of tests that fail when they are told to: what goes wrong, with which requests, how often.

`Faults` says which request fails; `FaultyHandler` is a request handler of the standard library that can make one fail.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler

KINDS = ("status", "reset_before", "reset_after", "hang", "hang_after")


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests that match."""

    kind: str
    """status: an error instead of doing it. reset_before, reset_after: the connection is reset before, or after, it is done.
    hang, hang_after: no answer until the faults are taken back, before or after it is done."""
    count: int = 1
    """How many requests."""
    match: str = ""
    """What the request has to contain, such as `INSERT INTO model_calls` or `PUT /bucket/_manifest`; backticks do not count."""
    skip: int = 0
    """How many matching requests go through first."""
    status: int = 500
    """HTTP status of `status`."""
    exception_code: int = 0
    """ClickHouse's code of `status`; 0 for an answer that is not ClickHouse's, as from a proxy."""


class Faults:
    """The faults that wait, in the order they were asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []
        self._injected: Counter[str] = Counter()
        self._taken_back = threading.Event()

    def add(self, fault: Fault) -> None:
        """Let requests fail."""
        with self._lock:
            self._waiting.append(fault)

    def clear(self) -> None:
        """Take all faults back, and let go of requests that hang."""
        with self._lock:
            self._waiting.clear()
            self._taken_back.set()
            self._taken_back = threading.Event()

    def take(self, request: str) -> Fault | None:
        """The fault of this request, if any."""
        plain = request.replace("`", "")
        with self._lock:
            for fault in self._waiting:
                if fault.match not in plain:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.count -= 1
                if fault.count <= 0:
                    self._waiting.remove(fault)
                self._injected[fault.kind] += 1
                return fault
        return None

    def hang(self) -> None:
        """Wait until the faults are taken back."""
        with self._lock:
            event = self._taken_back
        event.wait()

    def report(self) -> dict[str, object]:
        """What is waiting, and how many were injected, by kind."""
        with self._lock:
            return {"waiting": [asdict(fault) for fault in self._waiting], "injected": dict(self._injected)}


class FaultyHandler(BaseHTTPRequestHandler):
    """One connection of a client; HTTP/1.1, with whole bodies."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    faults: Faults

    def serve(self, request: str, do: Callable[[], tuple[int, bytes, Mapping[str, str]]]) -> None:
        """Do what a request asks for and answer it, unless a fault says otherwise.

        Args: request: what faults are matched with. do: returns status, body and headers.
        """
        fault = self.faults.take(request)
        kind = fault.kind if fault else ""
        if fault and kind == "status":
            self.answer(*self.refusal(fault))
            return
        if kind == "hang":
            self.faults.hang()
        if kind in ("hang", "reset_before"):
            self.reset()
            return
        answer = do()
        if kind == "hang_after":
            self.faults.hang()
        if kind in ("hang_after", "reset_after"):
            self.reset()
            return
        self.answer(*answer)

    def refusal(self, fault: Fault) -> tuple[int, bytes, Mapping[str, str]]:
        """The answer of a `status` fault."""
        return fault.status, b"injected", {}

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def reset(self) -> None:
        """Close the connection with RST, as when the server's machine goes away."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()

    def body(self) -> bytes:
        """The body of the request."""
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        """Nothing: one line a request would fill the log."""
