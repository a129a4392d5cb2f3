"""A ClickHouse to connect to over HTTP: the real engine behind a stand-in for its server, with faults on request.

The engine is chDB, in a process of its own; `tests/services/clickhouse_server.py` says what it does and does not prove. What
was inserted lies in the server's folder and outlives `kill()` and `restart()`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal
from urllib.request import Request, urlopen

from rollstream.process import Service, ServiceProcess, free_port
from tests.services import ROOT

FaultKind = Literal["status", "reset_before", "reset_after", "hang", "hang_after"]
_START_S = 60.0  # 1.5 s on an idle machine
_CONTROL_S = 10.0


class ClickHouseServer(Service):
    """One server; a context manager that starts it and stops it.

    Args:
        folder: where tables and the log file lie.
        database: the database that `url` names.
    """

    def __init__(self, folder: Path, database: str = "rollstream") -> None:
        self.folder = folder
        self.database = database
        self.port = free_port()

    @property
    def url(self) -> str:
        """Address for `sinks.connect`, such as `http://127.0.0.1:20123/rollstream`."""
        return f"http://127.0.0.1:{self.port}/{self.database}"

    def start(self) -> float:
        """Start the server on its port and folder; returns the seconds until it answers."""
        if self._process is None:
            self._process = ServiceProcess(
                "clickhouse stand-in",
                [sys.executable, "-m", "tests.services.clickhouse_server", self.folder / "engine", str(self.port)],
                log_file=self.folder / "clickhouse.log",
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},
            )
        self._process.start()
        return self._process.wait_until(self.is_up, _START_S, f"port {self.port} answers")

    def is_up(self) -> bool:
        """Whether it answers a ping."""
        with urlopen(f"http://127.0.0.1:{self.port}/ping", timeout=_CONTROL_S) as answer:
            return bool(answer.read() == b"Ok.\n")

    def fault(
        self,
        kind: FaultKind,
        *,
        match: str = "",
        count: int = 1,
        skip: int = 0,
        status: int = 500,
        exception_code: int = 0,
    ) -> None:
        """Let the next `count` statements that contain `match` fail, see `http_faults.Fault`."""
        asked = {
            "kind": kind,
            "match": match,
            "count": count,
            "skip": skip,
            "status": status,
            "exception_code": exception_code,
        }
        self._control("POST", json.dumps(asked).encode())

    def clear_faults(self) -> None:
        """Take back what has not been injected, and let go of requests that hang."""
        self._control("DELETE")

    def faults_waiting(self) -> list[str]:
        """What the faults that have not been injected wait for."""
        return [fault["match"] for fault in self._control("GET")["waiting"]]

    def _control(self, method: str, body: bytes | None = None) -> dict:  # type: ignore[type-arg]
        request = Request(f"http://127.0.0.1:{self.port}/_faults", data=body, method=method)
        with urlopen(request, timeout=_CONTROL_S) as answer:
            text = answer.read()
        return json.loads(text) if text else {}
