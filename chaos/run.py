"""`make chaos`: everything under load and faults, then the ledger of truth against what is stored.

    python -m chaos.run --minutes 30 --seed 1

One thread a lane inflicts its faults by the schedule, while `chaos.load` plays agents. Then the faults stop, the load
finishes what is open, the pipeline runs empty, and `chaos.compare` and `rollstream audit` judge. The exit code is 0 only if
nothing is lost, doubled or wrong. Every process ends with this one, whatever ends it. Logs: `<out>/logs`; result:
`<out>/report.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from chaos.cluster import Cluster
from chaos.compare import compare
from chaos.faults import ACTS, back, processor_group, sink_group
from chaos.positions import Observer, Recovery, Watcher
from chaos.report import RunFacts, as_table, make_report, write_report
from chaos.schedule import GROUPS, Fault, make_schedule
from rollstream.process import ServiceError, ServiceProcess
from tests.services import ROOT

SINKS = ("clickhouse", "objects")
READ_BY_WORKERS = frozenset({"calls", "environment", "terminals", "rollouts"})
"""What the workers have committed once they are through: a rollout is let go of when its group is built. Not what comes later,
since the group stage remembers its groups for longer, and what was made of a group is committed after it."""
_WAITS_FOR_RECOVERY = ("broker", "gateway", "engine")
"""Whose next fault waits until the last one is healed: a second broker must not go down, and who is down can suffer nothing."""
_OVERTIME_S = 120.0
"""How long a busy machine may take beyond the schedule to inflict all of it."""
_RECOVERY_S = 60.0
_LOAD_END_S = 180.0
_DRAIN_S = 240.0
_SETTLED_LOOKS = 8
_AUDIT_S = 600.0
_AGENTS = 160
_LEDGER = "ledger.jsonl"
OWN_ERROR = 2
"""Exit status of a process of ours that says why it cannot go on, and counts on being started again."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is run."""

    minutes: float
    """How long faults are injected, under load."""
    seed: int
    """Of the schedule and of the load."""
    rate: float
    """Most calls a second."""
    out: Path
    """Folder of logs, data and report; emptied first."""
    deadline_s: float | None
    """Deadline of rollouts and groups; None for that of chaos/pipeline.yaml."""


@dataclass(slots=True)
class Injected:
    """A fault that was inflicted."""

    fault: Fault
    """As it was planned."""
    began_s: float
    """When it really began, seconds after the start."""
    lasted_s: float
    """How long it really lasted."""
    recovery: Recovery
    """When its victim worked again."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        took_s = self.recovery.took_s
        return {**asdict(self.fault), "began_s": self.began_s, "lasted_s": self.lasted_s, "recovery_s": took_s}


class Injector:
    """Inflicts the faults of all lanes, each in its own thread.

    Args: started_s: the schedule's zero; monotonic clock.
    """

    def __init__(self, cluster: Cluster, watcher: Watcher, started_s: float) -> None:
        self._cluster = cluster
        self._watcher = watcher
        self.started_s = started_s
        self.stop = threading.Event()
        """Set to take back what is going on and inflict no more."""
        self.injected: list[Injected] = []

    def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Inflict them; returns when all are over, at the latest after `seconds` and some overtime."""
        lanes = [list(lane) for _, lane in groupby(sorted(faults, key=lambda f: (_lane(f), f.begin_s)), key=_lane)]
        with ThreadPoolExecutor(len(lanes)) as pool:
            try:
                running = [pool.submit(self._run_lane, lane) for lane in lanes]
                left_s = max(self.started_s + seconds + _OVERTIME_S - time.monotonic(), 0)
                done, _ = wait(running, left_s, FIRST_EXCEPTION)
            finally:
                self.stop.set()
        for lane_done in done:
            lane_done.result()

    def _run_lane(self, faults: Sequence[Fault]) -> None:
        last: Recovery | None = None
        for fault in faults:
            if last is not None and fault.group in _WAITS_FOR_RECOVERY:
                last.wait(self.stop)
            if self.stop.wait(max(self.started_s + fault.begin_s - time.monotonic(), 0)):
                return
            last = self._inflict(fault)

    def _inflict(self, fault: Fault) -> Recovery:
        act = ACTS[fault.kind]
        is_back, needs_look = back(self._cluster, fault.group, fault.target)
        began_s = time.monotonic()
        act.begin(self._cluster, fault.target)
        try:
            self.stop.wait(fault.lasts_s)
        finally:
            act.end(self._cluster, fault.target)
        over_s = time.monotonic()
        recovery = self._watcher.add(Recovery(began_s if act.is_crash else over_s, over_s, is_back, needs_look))
        since_start_s = round(began_s - self.started_s, 1)
        self.injected.append(Injected(fault, since_start_s, round(over_s - began_s, 1), recovery))
        _tell(f"{since_start_s:8.1f} s  {fault.kind} of {fault.target} for {over_s - began_s:.1f} s")
        return recovery


def _lane(fault: Fault) -> str:
    """Who shares a lane: a group of which only one may suffer at a time, or a target."""
    return fault.group if len(GROUPS[fault.group].lanes) == 1 else fault.target


def run(options: Options) -> int:
    """Run it all. Returns: the exit code."""
    seconds = options.minutes * 60
    _empty(options.out)
    with Cluster(options.out, options.deadline_s) as cluster:
        faults = make_schedule(options.seed, seconds, cluster.kinds)
        _tell(
            f"{len(faults)} faults of {len(cluster.kinds)} kinds in {options.minutes:g} minutes, seed {options.seed}"
        )
        for kind, why in cluster.left_out.items():
            _tell(f"left out: {kind}: {why}")
        groups = (processor_group(cluster), *(sink_group(cluster, kind) for kind in SINKS))
        with Watcher(Observer(cluster.kafka, groups)) as watcher, _load(cluster, options) as load:
            injector = Injector(cluster, watcher, time.monotonic())
            injector.run(faults, seconds)
            _tell("no more faults; the last victims recover under load")
            time.sleep(max(injector.started_s + seconds - time.monotonic(), 0))
            watcher.wait_for_all(_RECOVERY_S)
            _tell("the load finishes what is open")
            load.signal(signal.SIGTERM)
            load_status = load.wait_exit(_LOAD_END_S)
            is_drained = _drain(cluster, watcher, options)
        return _judge(cluster, options, injector.injected, load_status, is_drained)


def _empty(folder: Path) -> None:
    """Make an empty folder, where there is at most that of an earlier run."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "logs").is_dir():
        raise ServiceError(f"cannot empty --out={str(folder)!r}: no earlier run made it; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _load(cluster: Cluster, options: Options) -> ServiceProcess:
    endless = sys.maxsize
    arguments = [
        *("--gateways", ",".join(cluster.gateways)),
        *("--seed", str(options.seed)),
        *("--rate", str(options.rate)),
        *("--calls", str(endless)),
        *("--agents", str(_AGENTS)),
        *("--ledger", str(options.out / _LEDGER)),
    ]
    return ServiceProcess(
        "load", [sys.executable, "-m", "chaos.load", *arguments], log_file=cluster.logs / "load.log", cwd=ROOT
    )


def _drain(cluster: Cluster, watcher: Watcher, options: Options) -> bool:
    """Wait until all that was written is through, deadlines included. Returns: whether it is, in bounded time."""
    deadline_s = options.deadline_s or 120.0
    groups = {processor_group(cluster): READ_BY_WORKERS, **{sink_group(cluster, kind): None for kind in SINKS}}
    settled, last, why = 0, None, "the brokers do not say where the logs end"
    for now in watcher.looks(2 * deadline_s + _DRAIN_S):
        if now is None:
            settled, last = 0, None
            continue
        lags = {group: lag for group, nouns in groups.items() if (lag := now.lag(group, now.ends, nouns))}
        settled = settled + 1 if not lags and now.ends == last else 0
        last, why = now.ends, f"not committed: {lags}" if lags else "something is still written"
        if settled == _SETTLED_LOOKS:
            _tell("the pipeline is empty")
            return True
    _tell(f"the pipeline did not run empty in time; {why}")
    return False


def _judge(cluster: Cluster, options: Options, injected: list[Injected], load_status: int, is_drained: bool) -> int:
    """Compare, audit and report. Returns: the exit code."""
    ledger = options.out / _LEDGER
    verdict = compare(ledger, cluster.settings())
    command = [sys.executable, "-m", "rollstream", "audit", "--closed"]
    audit = ServiceProcess("audit", command, log_file=cluster.logs / "audit.log", env=cluster.environment(), cwd=ROOT)
    with audit:
        audit_status = audit.wait_exit(_AUDIT_S)
    facts = RunFacts(
        seed=options.seed,
        minutes=options.minutes,
        faults=[(one.fault.kind, one.recovery.took_s) for one in injected],
        left_out=cluster.left_out,
        unexpected_exits=[asdict(one) for one in cluster.fleet.exits if one.status != OWN_ERROR],
        more={
            "is_drained": is_drained,
            "load_status": load_status,
            "audit_status": audit_status,
            "exits_on_own_errors": [asdict(one) for one in cluster.fleet.exits if one.status == OWN_ERROR],
            "injected": [one.as_dict() for one in sorted(injected, key=lambda one: one.began_s)],
        },
    )
    report = make_report(facts, _summary(ledger), verdict, folder=ROOT)
    report["ok"] = report["ok"] and is_drained and load_status == audit_status == 0
    write_report(report, options.out / "report.json")
    _tell(as_table(report))
    if audit_status != 0:
        _tell(audit.log_tail())
    return 0 if report["ok"] else 1


def _summary(ledger: Path) -> dict[str, Any]:
    """What the load wrote at its end; empty if it did not come to it."""
    with ledger.open("rb") as lines:
        last = json.loads(deque(lines, 1)[0])
    return last if last["k"] == "end" else {}


def _tell(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m chaos.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the load")
    parser.add_argument("--rate", type=float, default=200.0, help="most calls a second")
    parser.add_argument(
        "--out", type=Path, default=Path("out/chaos"), help="folder of logs, data and report; emptied"
    )
    parser.add_argument(
        "--deadline-s", type=float, help="deadline of rollouts and groups instead of the pipeline file's"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run(Options(options.minutes, options.seed, options.rate, options.out.resolve(), options.deadline_s)))


if __name__ == "__main__":
    main()
