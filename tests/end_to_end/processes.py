"""Our own processes as child processes of a test, configured through the environment as a user would."""

from __future__ import annotations

import sys
from pathlib import Path

from rollstream.process import ServiceProcess
from rollstream.settings import KafkaSettings


def our_process(name: str, arguments: list[str], folder: Path, kafka: KafkaSettings, **more: str) -> ServiceProcess:
    """`rollstream ARGUMENTS` with the given Kafka and `more` as further ROLLSTREAM_ variables."""
    return ServiceProcess(
        name,
        [sys.executable, "-m", "rollstream", *arguments],
        log_file=folder / f"{name}.log",
        env={
            "ROLLSTREAM_KAFKA__BOOTSTRAP": kafka.bootstrap,
            "ROLLSTREAM_KAFKA__PREFIX": kafka.prefix,
            "ROLLSTREAM_KAFKA__PARTITIONS": str(kafka.partitions),
            "ROLLSTREAM_KAFKA__SESSION_TIMEOUT_MS": str(kafka.session_timeout_ms),
            "OMP_NUM_THREADS": "1",
            **{f"ROLLSTREAM_{variable}": value for variable, value in more.items()},
        },
    )
