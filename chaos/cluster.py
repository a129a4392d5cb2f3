"""Everything that `make chaos` runs, as processes of this machine: network, brokers, stores, engine, and our own.

Who can be cut off by itself has a network namespace of its own: brokers, gateways and workers. The stores, the engine, the sinks
and the load are here, outside of all of them. Where namespaces cannot be made, all run here, and `left_out` says which faults
are not possible for that.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from chaos.disk import SlowDisk, missing_for_slow_disk
from chaos.fleet import Fleet, Member
from chaos.network import Network, missing_for_network
from chaos.schedule import KINDS, SESSION_S, Kind
from rollstream.process import ServiceError, ServiceProcess, free_port
from rollstream.settings import KafkaSettings, Settings, load_settings
from rollstream.topic_admin import apply_topics
from tests.services import ROOT
from tests.services.clickhouse import ClickHouseServer
from tests.services.kafka import KafkaCluster, Place
from tests.services.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server

BROKERS = ("broker-1", "broker-2", "broker-3")
GATEWAYS = ("gateway-1", "gateway-2")
WORKERS = ("worker-1", "worker-2", "worker-3")
"""The third one runs only while it is scaled up."""
PARTITIONS = 4
_BUCKET = "chaos"
_INLINE_BYTES = 16 * 1024  # so that some rollouts go by reference
_READY_S = 90.0
_PROBE_S = 1.0
# 2 cores serve three brokers and everything else: records wait for company, and so do readers.
_BATCHING = {"linger.ms": "100", "fetch.min.bytes": "100000"}
# A broker syncs what it was given this often: without it only the page cache would meet the slow disk.
_BROKER = {"log.flush.interval.messages": "500"}


class Cluster:
    """All processes but the load; a context manager that starts them and ends every one of them.

    Args:
        folder: an empty folder for data and logs.
        deadline_s: of rollouts and groups; None for the pipeline file's own.
    """

    def __init__(self, folder: Path, deadline_s: float | None = None) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        no_network, no_slow_disk = missing_for_network(), missing_for_slow_disk(folder)
        self.left_out = {
            kind.name: why
            for kind in KINDS
            for why in (no_network if "partition" in kind.name else no_slow_disk if "slow" in kind.name else None,)
            if why is not None
        }
        """Kinds of faults that this machine does not let us inflict, with the reason."""
        self.network = None if no_network else Network([*BROKERS, *GATEWAYS, *WORKERS], self.logs)
        self.clickhouse = ClickHouseServer(folder / "clickhouse")
        self.s3 = S3Server(folder / "s3")
        self.pipeline = folder / "pipeline.yaml"
        self._write_pipeline(deadline_s)
        self._stack = ExitStack()

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of faults that are possible."""
        return [kind for kind in KINDS if kind.name not in self.left_out]

    @property
    def network_or_error(self) -> Network:
        """The network. Raises: ServiceError: there is none, so nobody can be cut off."""
        if self.network is None:
            raise ServiceError(f"cannot cut off anybody: {self.left_out}")
        return self.network

    @property
    def objects(self) -> str:
        """Where the object sink writes."""
        return f"s3://{_BUCKET}/objects"

    @property
    def s3_options(self) -> dict[str, str]:
        """How the object store is reached."""
        return {
            "endpoint": self.s3.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }

    @property
    def gateways(self) -> list[str]:
        """Addresses for the load."""
        return [f"http://{self._place(name).host}:{port}" for name, port in self._gateway_ports.items()]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.network is not None:
                stack.enter_context(self.network)
            stack.enter_context(self.s3)
            self.s3.create_bucket(_BUCKET)
            stack.enter_context(self.clickhouse)
            self.brokers = KafkaCluster(
                self.folder / "kafka",
                places=[self._place(name) for name in BROKERS],
                settings=_BROKER,
                heap_mb=320,
            )
            self.kafka = KafkaSettings(
                bootstrap=self.brokers.bootstrap,
                prefix="chaos",
                partitions=PARTITIONS,
                replication=len(BROKERS),
                session_timeout_ms=int(SESSION_S * 1000),
                properties=_BATCHING,
            )
            self._link_logs()
            stack.enter_context(self.brokers)
            self.slow_disks = {name: SlowDisk(name, self.folder) for name in BROKERS}
            for disk in self.slow_disks.values():
                stack.callback(disk.end)
            apply_topics(self.kafka)
            self._gateway_ports = {name: free_port() for name in GATEWAYS}
            self._engine_port = free_port()
            self.fleet = stack.enter_context(Fleet(self._members()))
            self.fleet["worker-3"].is_wanted = False
            self.fleet.start()
            for name in ("engine", *GATEWAYS):
                self.fleet[name].process.wait_until(lambda name=name: self.is_healthy(name), _READY_S)  # type: ignore[misc]
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _link_logs(self) -> None:
        """Show the logs that services keep in their own folders beside all others."""
        files = {name: node.folder / "kafka.log" for name, node in zip(BROKERS, self.brokers.nodes, strict=True)}
        files |= {"clickhouse": self.clickhouse.folder / "clickhouse.log", "s3": self.s3.folder / "s3.log"}
        for name, file in files.items():
            (self.logs / f"{name}.log").symlink_to(Path("..") / file.relative_to(self.folder))

    def is_healthy(self, name: str) -> bool:
        """Whether a gateway or the engine answers `/health`."""
        try:
            self._ask(name, "/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def spoil_engine(self, kind: str, requests: int) -> None:
        """Let the next requests to the engine go wrong."""
        self._ask("engine", "/control", {"kind": kind, "requests": requests})

    def broker_id(self, name: str) -> int:
        """The node id of a broker."""
        return BROKERS.index(name) + 1

    def settings(self) -> Settings:
        """The settings that every process of ours runs with."""
        return load_settings(environ=self.environment())

    def environment(self) -> dict[str, str]:
        """The same as variables."""
        kafka = self.kafka
        names = {
            "KAFKA__BOOTSTRAP": kafka.bootstrap,
            "KAFKA__PREFIX": kafka.prefix,
            "KAFKA__PARTITIONS": str(kafka.partitions),
            "KAFKA__REPLICATION": str(kafka.replication),
            "KAFKA__SESSION_TIMEOUT_MS": str(kafka.session_timeout_ms),
            "KAFKA__PROPERTIES": json.dumps(kafka.properties),
            "SINK__CLICKHOUSE": self.clickhouse.url,
            "SINK__OBJECTS": self.objects,
            "SINK__S3": json.dumps(self.s3_options),
            "SINK__OBJECTS_MAX_AGE_S": "5",
            "CLAIMS__STORE": str(self.folder / "claims"),
            "CLAIMS__INLINE_BYTES": str(_INLINE_BYTES),
            "PROCESSOR__PIPELINE": str(self.pipeline),
        }
        return {**{f"ROLLSTREAM_{name}": value for name, value in names.items()}, "OMP_NUM_THREADS": "1"}

    def _members(self) -> list[Member]:
        engine_host = "127.0.0.1" if self.network is None else self.network.here
        engine = ["-m", "chaos.engine", "--host", engine_host, "--port", str(self._engine_port)]
        gateway = {
            "GATEWAY__ENGINE_URL": f"http://{engine_host}:{self._engine_port}",
            "GATEWAY__ENGINE_TIMEOUT_S": "15",
            "GATEWAY__KEY_SECRET": "the same in every gateway, as in production",
        }
        return [
            Member(self._process("engine", engine, Place(), {})),
            *(
                self._ours(
                    name,
                    ["gateway"],
                    **gateway,
                    GATEWAY__HOST=self._place(name).host,
                    GATEWAY__PORT=str(port),
                    GATEWAY__SPOOL_DIR=str(self.folder / "spool" / name),
                )
                for name, port in self._gateway_ports.items()
            ),
            *(self._ours(name, ["processor"], PROCESSOR__INSTANCE_ID=name) for name in WORKERS),
            *(self._ours(f"sink-{kind}", ["sink", kind]) for kind in ("clickhouse", "objects")),
        ]

    def _ours(self, name: str, arguments: list[str], **more: str) -> Member:
        variables = {**self.environment(), **{f"ROLLSTREAM_{key}": value for key, value in more.items()}}
        return Member(self._process(name, ["-m", "rollstream", *arguments], self._place(name), variables))

    def _process(self, name: str, arguments: list[str], place: Place, variables: Mapping[str, str]) -> ServiceProcess:
        return ServiceProcess(
            name,
            [*place.enter, sys.executable, *arguments],
            log_file=self.logs / f"{name}.log",
            env=variables,
            cwd=ROOT,
        )

    def _place(self, name: str) -> Place:
        if self.network is None or name not in (*BROKERS, *GATEWAYS, *WORKERS):
            return Place()
        return self.network.place(name)

    def _ask(self, name: str, path: str, values: object = None) -> Any:
        if name == "engine":
            host = "127.0.0.1" if self.network is None else self.network.here
            url = f"http://{host}:{self._engine_port}"
        else:
            url = self.gateways[GATEWAYS.index(name)]
        data = None if values is None else json.dumps(values).encode()
        request = urllib.request.Request(url + path, data=data)
        with urllib.request.urlopen(request, timeout=_PROBE_S) as answer:
            return json.loads(answer.read() or b"{}")

    def _write_pipeline(self, deadline_s: float | None) -> None:
        values = yaml.safe_load(Path(__file__).with_name("pipeline.yaml").read_text("utf-8"))
        if deadline_s is not None:
            values["join"]["deadline_s"] = values["group"]["deadline_s"] = deadline_s
        self.pipeline.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
