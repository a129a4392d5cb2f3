"""Real Apache Kafka in KRaft mode, run from its Maven jars on free ports, without docker.

The jars named in `kafka/pom.xml` are copied once into `build/kafka/` by Maven. A broker keeps its log folder: after
`kill()` or `stop()` a `start()` serves the same topics on the same port, which is what the tests of crashes and
restarts are about. Every node is broker and controller. A `KafkaBroker` by itself keeps one copy of everything; the
nodes of a `KafkaCluster` keep one copy each and acknowledge what two of three have.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: an address of its own, and what enters the network namespace that has it."""

    host: str = "127.0.0.1"
    """The address it listens on, as others reach it."""
    enter: tuple[str, ...] = ()
    """Command that runs another one there, such as `nsenter --net=FILE`; empty: here."""


class KafkaBroker(Service):
    """One Kafka broker; a context manager that starts it and stops it.

    Args:
        folder: an empty or earlier used folder for its log folder, settings and log file.
        settings: more broker settings, such as `{"log.retention.ms": "1000"}`; they win over the ones here.
        heap_mb: size of the Java heap.
        place: where it runs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, str] | None = None,
        heap_mb: int = 512,
        place: Place | None = None,
    ) -> None:
        self.folder = folder
        self.place = place or Place()
        self.port = free_port()
        self.controller_port = free_port()
        self._settings = dict(settings or {})
        self._quorum = ["--standalone", f"--cluster-id={_new_id()}"]
        self._java = [
            *(*self.place.enter, "java", f"-Xmx{heap_mb}m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
            f"-Dlog4j2.configurationFile={_LOG4J}",
        ]

    @property
    def bootstrap(self) -> str:
        """Address for clients, such as `127.0.0.1:20123`; it stays the same over restarts."""
        return f"{self.place.host}:{self.port}"

    def join(self, node_id: int, cluster_id: str, voters: str) -> None:
        """Make it one node of a cluster, before its first start; `voters` is StorageTool's list of first controllers."""
        addresses = ",".join(voter.partition("@")[2].rpartition(":")[0] for voter in voters.split(","))
        self._settings = {
            "node.id": str(node_id),
            "controller.quorum.bootstrap.servers": addresses,
            **self._settings,
        }
        self._quorum = [f"--initial-controllers={voters}", f"--cluster-id={cluster_id}"]

    def start(self) -> float:
        """Start the broker on its port and log folder; returns the seconds until it serves clients."""
        if self._process is None:
            self._process = self._prepare()
        self.process.start()
        waited_s = self.process.wait_until(self._has_started, _START_S, "it serves clients")
        return waited_s + self.process.wait_until(self._accepts, _START_S, f"port {self.port} accepts connections")

    @property
    def was_started(self) -> bool:
        """Whether there is a process, running or not."""
        return self._process is not None

    def _prepare(self) -> ServiceProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._all_settings().items()))
        java = [*self._java, "-cp", f"{kafka_jars()}/*"]
        if not (self.folder / "data" / "meta.properties").exists():
            tool = ["kafka.tools.StorageTool", "format", *self._quorum, "-c", str(properties)]
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
            "controller.quorum.bootstrap.servers": f"{self.place.host}:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{self.place.host}:{self.controller_port}",
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
        with socket.create_connection((self.place.host, self.port), timeout=1):
            return True


_CLUSTER = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    # Three on one machine: few threads, and a cleaner's buffer (128 MB by default) that fits a small heap.
    "num.network.threads": "2",
    "num.io.threads": "3",
    "background.threads": "2",
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    # A busy machine must not lose a broker that only waited for the processor; a frozen one is fenced after this.
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
}


class KafkaCluster:
    """Three brokers that keep a copy of everything each; any one may be killed, frozen or cut off and come back.

    Args:
        folder: holds one folder a node.
        places: where the three nodes run; default: all on the loopback address.
        settings: more settings of every node; they win.
        heap_mb: size of each Java heap.
    """

    def __init__(
        self,
        folder: Path,
        *,
        places: Sequence[Place] | None = None,
        settings: Mapping[str, str] | None = None,
        heap_mb: int = 384,
    ) -> None:
        self.nodes = [
            KafkaBroker(folder / f"node-{n}", settings={**_CLUSTER, **(settings or {})}, heap_mb=heap_mb, place=place)
            for n, place in enumerate(places or [Place()] * 3, start=1)
        ]
        cluster_id = _new_id()
        voters = ",".join(
            f"{n}@{node.place.host}:{node.controller_port}:{_new_id()}" for n, node in enumerate(self.nodes, start=1)
        )
        for n, node in enumerate(self.nodes, start=1):
            node.join(n, cluster_id, voters)

    @property
    def bootstrap(self) -> str:
        """Addresses of all nodes for clients; they stay the same over restarts."""
        return ",".join(node.bootstrap for node in self.nodes)

    def start(self) -> None:
        """Start all nodes, and return when each serves clients: at once, for none does before a second one is there."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(KafkaBroker.start, self.nodes))

    def kill(self) -> None:
        """Crash all nodes. Ending them in order would take long: the last ones have nobody to hand over to."""
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                if node.was_started:
                    stack.callback(node.kill)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.kill)
            self.start()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _new_id() -> str:
    """An id as Kafka writes them. One that begins with a dash would be read as an option."""
    while (found := urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()).startswith("-"):
        continue
    return found
