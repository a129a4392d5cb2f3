"""Every process of the demo, started in order and stopped in reverse, each with its log in `out/demo/logs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from rollstream.embedded import EmbeddedBroker, broker_environment
from rollstream.process import ServiceProcess, free_port

_START_S = 120.0
_STOP_S = 60.0


class Parts:
    """The demo's processes around one embedded broker."""

    def __init__(self, out: Path, model: Path, pipeline: Path) -> None:
        self.out = out
        self.model = model
        self.gateway_url = f"http://127.0.0.1:{free_port()}"
        self.clickhouse = f"chdb://{out / 'clickhouse'}"
        self.objects = out / "objects"
        self.broker = EmbeddedBroker(out / "logs" / "kafka.log")
        self._pipeline = pipeline
        self._stack = ExitStack()
        self.processes: dict[str, ServiceProcess] = {}

    def start_stream(self) -> None:
        """Broker, topics, processors and sinks: all that needs no model."""
        self._stack.enter_context(self.broker)
        topics = self.start("topics", ["-m", "rollstream", "topics", "apply"])
        if topics.wait_exit(_START_S) != 0:
            raise SystemExit(f"making the topics failed; log {topics.log_file}:\n{topics.log_tail()}")
        self.start("processors", ["-m", "rollstream", "processor"])
        self.start("sink-clickhouse", ["-m", "rollstream", "sink", "clickhouse"])
        self.start("sink-objects", ["-m", "rollstream", "sink", "objects"])

    def start_gateway(self) -> None:
        """The gateway with the model in its process; returns once it serves."""
        gateway = self.start("gateway", ["-m", "rollstream", "gateway"])
        gateway.wait_until(lambda: _answers(f"{self.gateway_url}/health"), _START_S, "/health answers")

    def start(self, name: str, arguments: Sequence[str]) -> ServiceProcess:
        """Start one Python process with the demo's settings."""
        process = ServiceProcess(
            name,
            [sys.executable, *arguments],
            log_file=self.out / "logs" / f"{name}.log",
            env=self.environment(),
            stop_timeout_s=_STOP_S,
        )
        self._stack.enter_context(process)
        self.processes[name] = process
        return process

    def environment(self) -> dict[str, str | None]:
        """The settings of every process, as environment variables."""
        return {
            **broker_environment(self.broker.bootstrap),
            "ROLLSTREAM_KAFKA__PARTITIONS": "4",
            "ROLLSTREAM_GATEWAY__ENGINE": "local",
            "ROLLSTREAM_GATEWAY__PORT": self.gateway_url.rpartition(":")[2],
            "ROLLSTREAM_GATEWAY__MODEL_PATH": str(self.model),
            "ROLLSTREAM_GATEWAY__MAX_OUTPUT_TOKENS": "32",
            "ROLLSTREAM_GATEWAY__SPOOL_DIR": str(self.out / "spool"),
            "ROLLSTREAM_PROCESSOR__PIPELINE": str(self._pipeline),
            "ROLLSTREAM_SINK__CLICKHOUSE": self.clickhouse,
            "ROLLSTREAM_SINK__OBJECTS": str(self.objects),
            "ROLLSTREAM_SINK__OBJECTS_MAX_AGE_S": "5",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def check(self) -> None:
        """Raise if a process that should run has died."""
        for name in ("processors", "sink-clickhouse", "sink-objects", "gateway"):
            process = self.processes.get(name)
            if process is not None and not process.is_running():
                raise SystemExit(
                    f"{name} ended with status {process.returncode}; log {process.log_file}:\n{process.log_tail()}"
                )

    def stop(self) -> None:
        """Stop everything, newest first."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Tail:
    """Reads the JSON lines that a process has added to its log since the last look."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        if self._file.exists():
            with self._file.open("rb") as log:
                log.seek(self._at)
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
