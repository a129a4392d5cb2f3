"""A real Apache Kafka broker in KRaft mode, run from its Maven jars on a free port, without docker.

The jars named in `kafka/pom.xml` are copied once into `build/kafka/` by Maven. A broker keeps its log folder: after
`kill()` or `stop()` a `start()` serves the same topics on the same port, which is what the tests of crashes and
restarts are about. One broker is one node that is broker and controller; its replication factors are 1.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from rollstream.process import Service, ServiceError, ServiceProcess, free_port
from tests.services import BUILD, locked

_POM = Path(__file__).with_name("kafka") / "pom.xml"
_LOG4J = _POM.with_name("log4j2.xml")
_JARS = BUILD / "kafka"
_START_S = 90.0  # 4 s on an idle machine of 2 cores
_FORMAT_S = 60.0


def kafka_jars() -> Path:
    """The folder with the broker's jars, which Maven fills first when it is not complete.

    Raises:
        ServiceError: Maven failed; the message names the log file.
    """
    stamp = _JARS / "complete.xml"
    with locked(_JARS):
        if not (stamp.exists() and stamp.read_bytes() == _POM.read_bytes()):
            shutil.rmtree(_JARS, ignore_errors=True)
            _copy_jars()
            shutil.copyfile(_POM, stamp)
    return _JARS


def _copy_jars() -> None:
    log_file = _JARS.with_suffix(".log")
    command = ["mvn", "-B", "-q", "-f", str(_POM), "dependency:copy-dependencies", f"-DoutputDirectory={_JARS}"]
    with log_file.open("wb") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        except FileNotFoundError as error:
            raise ServiceError(
                "cannot fetch Kafka's jars: `mvn` is not installed; install Maven and Java 17"
            ) from error
    if done.returncode != 0:
        raise ServiceError(f"cannot fetch Kafka's jars: mvn ended with status {done.returncode}; see {log_file}")


class KafkaBroker(Service):
    """One Kafka broker; a context manager that starts it and stops it.

    Args:
        folder: an empty or earlier used folder for its log folder, settings and log file.
        settings: more broker settings, such as `{"log.retention.ms": "1000"}`; they win over the ones here.
        heap_mb: size of the Java heap.
    """

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None, heap_mb: int = 512) -> None:
        self.folder = folder
        self.port = free_port()
        self._controller_port = free_port()
        self._settings = dict(settings or {})
        self._java = [
            *("java", f"-Xmx{heap_mb}m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
            f"-Dlog4j2.configurationFile={_LOG4J}",
        ]

    @property
    def bootstrap(self) -> str:
        """Address for clients, such as `127.0.0.1:20123`; it stays the same over restarts."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start the broker on its port and log folder; returns the seconds until it serves clients."""
        if self._process is None:
            self._process = self._prepare()
        self.process.start()
        waited_s = self.process.wait_until(self._has_started, _START_S, "it serves clients")
        return waited_s + self.process.wait_until(self._accepts, _START_S, f"port {self.port} accepts connections")

    def _prepare(self) -> ServiceProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._all_settings().items()))
        java = [*self._java, "-cp", f"{kafka_jars()}/*"]
        if not (self.folder / "data" / "meta.properties").exists():
            cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
            tool = [
                "kafka.tools.StorageTool",
                "format",
                "--standalone",
                f"--cluster-id={cluster}",
                "-c",
                str(properties),
            ]
            log_file = self.folder / "format.log"
            formatting = ServiceProcess("Kafka's StorageTool", [*java, *tool], log_file=log_file)
            with formatting:
                if formatting.wait_exit(_FORMAT_S) != 0:
                    raise ServiceError(f"cannot format Kafka's log folder; see {log_file}:\n{formatting.log_tail()}")
        return ServiceProcess("Kafka", [*java, "kafka.Kafka", str(properties)], log_file=self.folder / "kafka.log")

    def _all_settings(self) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.folder / "data"),
            "auto.create.topics.enable": "false",
            "default.replication.factor": "1",
            "min.insync.replicas": "1",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # After kill -9 the controller refuses the new process until the old one's session ends: 9 s by default.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "300",
            **self._settings,
        }

    def _has_started(self) -> bool:
        return "Kafka Server started" in self.process.log_text()

    def _accepts(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
