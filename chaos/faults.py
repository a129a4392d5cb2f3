"""What each kind of fault does, how it is taken back, and how one sees that its victim works again.

A new kind is a line in `schedule.KINDS` and an entry of `ACTS`. When a victim works again: a broker, when all its copies are in
sync; a gateway and the engine, when they answer; a worker, when every partition has new rollouts; a sink and its store, when
all that the log held at the end of the fault is stored and committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from chaos.cluster import BROKERS, Cluster
from chaos.positions import Back, Positions
from rollstream.process import Service

FaultKind = Literal["status", "reset_before", "reset_after", "hang", "hang_after"]
"""As `tests/services/clickhouse_server.py` knows them."""
_WHILE_IT_LASTS = 1_000_000
_SPOILED_CALLS = 40
_HUNG_CALLS = 8


@dataclass(frozen=True, slots=True)
class Act:
    """What a kind of fault does to a target."""

    begin: Callable[[Cluster, str], None]
    """Inflict it."""
    end: Callable[[Cluster, str], None]
    """Take it back."""
    is_crash: bool = False
    """Whether recovery counts from its begin: the victim cannot work before it was started again, which is part of it."""


def processor_group(cluster: Cluster) -> str:
    """The consumer group of the workers."""
    return f"{cluster.kafka.prefix}.processor.join-group-score-reward-credit-build"


def sink_group(cluster: Cluster, kind: str) -> str:
    """The consumer group of a sink."""
    return f"{cluster.kafka.prefix}.sink.{kind}"


def back(cluster: Cluster, group: str, target: str) -> tuple[Back | Callable[[], bool], bool]:
    """What to wait for after a fault, and whether it needs positions."""
    if group == "broker":
        node = cluster.broker_id(target)
        return lambda _first, now: node not in now.behind, True
    if group == "worker":
        return _all_rollouts_move, True
    if group in ("sink", "clickhouse", "s3"):
        kind = "objects" if target in ("s3", "sink-objects") else "clickhouse"
        consumers = sink_group(cluster, kind)
        return lambda first, now: now.has_passed(consumers, first.ends), True
    return partial(cluster.is_healthy, target), False


def _all_rollouts_move(first: Positions, now: Positions) -> bool:
    return all(now.ends[where] > end for where, end in first.ends.items() if where[0] == "rollouts")


# ---------------------------------------------------------------------------------------------- processes of ours


def _kill(cluster: Cluster, target: str) -> None:
    cluster.fleet[target].kill()


def _start(cluster: Cluster, target: str) -> None:
    cluster.fleet[target].start()


def _pause(cluster: Cluster, target: str) -> None:
    cluster.fleet[target].process.pause()


def _resume(cluster: Cluster, target: str) -> None:
    cluster.fleet[target].process.resume()


def _scale(member: str, cluster: Cluster, _target: str, *, is_wanted: bool) -> None:
    cluster.fleet[member].want(is_wanted)


# -------------------------------------------------------------------------------------------- brokers and stores


def _service(cluster: Cluster, target: str) -> Service:
    if target in BROKERS:
        return cluster.brokers.nodes[BROKERS.index(target)]
    return {"clickhouse": cluster.clickhouse, "s3": cluster.s3}[target]


def _kill_service(cluster: Cluster, target: str) -> None:
    _service(cluster, target).kill()


def _start_service(cluster: Cluster, target: str) -> None:
    _service(cluster, target).start()


def _pause_service(cluster: Cluster, target: str) -> None:
    _service(cluster, target).pause()


def _resume_service(cluster: Cluster, target: str) -> None:
    _service(cluster, target).resume()


# ------------------------------------------------------------------------------------- network, disk, wrong answers


def _cut(cluster: Cluster, target: str) -> None:
    cluster.network_or_error.cut(target)


def _heal(cluster: Cluster, target: str) -> None:
    cluster.network_or_error.heal(target)


def _slow(cluster: Cluster, target: str) -> None:
    cluster.slow_disks[target].begin(_service(cluster, target).process.pid)


def _fast(cluster: Cluster, target: str) -> None:
    cluster.slow_disks[target].end()


def _clickhouse(
    kind: FaultKind, cluster: Cluster, _target: str, *, status: int = 500, exception_code: int = 0
) -> None:
    cluster.clickhouse.fault(kind, count=_WHILE_IT_LASTS, status=status, exception_code=exception_code)


def _clear_clickhouse(cluster: Cluster, _target: str) -> None:
    cluster.clickhouse.clear_faults()


def _spoil(kind: str, requests: int, cluster: Cluster, _target: str) -> None:
    cluster.spoil_engine(kind, requests)


def _nothing(_cluster: Cluster, _target: str) -> None:
    """The engine counts by itself how many answers it spoils."""


ACTS = {
    "broker_kill": Act(_kill_service, _start_service, is_crash=True),
    "broker_pause": Act(_pause_service, _resume_service),
    "broker_partition": Act(_cut, _heal),
    "broker_slow_disk": Act(_slow, _fast),
    "gateway_kill": Act(_kill, _start, is_crash=True),
    "gateway_pause": Act(_pause, _resume),
    "gateway_partition": Act(_cut, _heal),
    "worker_kill": Act(_kill, _start, is_crash=True),
    "worker_zombie": Act(_pause, _resume),
    "worker_partition": Act(_cut, _heal),
    "scale_up": Act(partial(_scale, "worker-3", is_wanted=True), partial(_scale, "worker-3", is_wanted=False)),
    "scale_down": Act(partial(_scale, "worker-2", is_wanted=False), partial(_scale, "worker-2", is_wanted=True)),
    "sink_kill": Act(_kill, _start, is_crash=True),
    "sink_pause": Act(_pause, _resume),
    "clickhouse_kill": Act(_kill_service, _start_service, is_crash=True),
    "clickhouse_busy": Act(partial(_clickhouse, "status", status=429), _clear_clickhouse),
    "clickhouse_error": Act(partial(_clickhouse, "status", status=500), _clear_clickhouse),
    "clickhouse_reset_before": Act(partial(_clickhouse, "reset_before"), _clear_clickhouse),
    "clickhouse_reset_after": Act(partial(_clickhouse, "reset_after"), _clear_clickhouse),
    "clickhouse_hang": Act(partial(_clickhouse, "hang"), _clear_clickhouse),
    "clickhouse_hang_after": Act(partial(_clickhouse, "hang_after"), _clear_clickhouse),
    "clickhouse_too_many_parts": Act(partial(_clickhouse, "status", exception_code=252), _clear_clickhouse),
    "s3_kill": Act(_kill_service, _start_service, is_crash=True),
    "s3_pause": Act(_pause_service, _resume_service),
    "engine_kill": Act(_kill, _start, is_crash=True),
    "engine_pause": Act(_pause, _resume),
    "engine_error": Act(partial(_spoil, "error", _SPOILED_CALLS), _nothing),
    "engine_cut": Act(partial(_spoil, "cut", _SPOILED_CALLS), _nothing),
    "engine_hang": Act(partial(_spoil, "hang", _HUNG_CALLS), _nothing),
}
"""What every kind of `schedule.KINDS` does."""
