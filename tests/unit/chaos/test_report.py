"""The report of a run: what it counts, and when it says ok."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from chaos.compare import Verdict
from chaos.problem import Problem
from chaos.report import RunFacts, as_table, make_report, recovery_times, write_report

SUMMARY = {"k": "end", "seconds": 10.0, "rollouts finished": 7, "rollouts vanished": 1}
COUNTS = {"calls requested": 60, "calls acknowledged": 50, "groups": 2, "groups full": 1, "rollouts": 8}


def facts(**more: object) -> RunFacts:
    return RunFacts(3, 0.5, [("worker_kill", 2.0), ("worker_kill", 4.0), ("broker_kill", None)], **more)  # type: ignore[arg-type]


def test_report_holds_what_happened(tmp_path: Path) -> None:
    """Faults by kind, calls, rollouts, groups, the verdict, recovery and throughput; as JSON and as a table."""
    verdict = Verdict(counts=dict(COUNTS), twins=2)

    report = make_report(facts(left_out={"disk_slow": "no cgroup"}), SUMMARY, verdict)
    write_report(report, tmp_path / "out" / "report.json")

    read = orjson.loads((tmp_path / "out" / "report.json").read_bytes())
    assert {
        "total": 3,
        "by_kind": {"broker_kill": 1, "worker_kill": 2},
        "left_out": {"disk_slow": "no cgroup"},
    } == read["faults"]
    assert ({"requested": 60, "acknowledged": 50}, 5.0) == (read["calls"], read["throughput"]["calls_per_s"])
    assert {"played": 8, "finished": 7, "vanished": 1} == read["rollouts"]
    assert (True, 0, 2) == (read["ok"], read["lost"], read["twins"])
    assert "worker_kill" in as_table(read)
    assert as_table(read).endswith("ok")


def test_recovery_is_told_by_kind() -> None:
    """A victim that was not seen to work again is counted, and is no time."""
    times = recovery_times([("kill", float(number)) for number in range(1, 101)] + [("pause", None)])

    assert {"count": 100, "median": 50.5, "p99": 99, "longest": 100, "not_seen": 0} == times["kill"]
    assert {"count": 1, "median": None, "p99": None, "longest": None, "not_seen": 1} == times["pause"]
    assert (101, 1) == (times["all"]["count"], times["all"]["not_seen"])


@pytest.mark.parametrize("kind", ["lost", "doubled", "wrong"])
def test_one_problem_is_not_ok(kind: str) -> None:
    """A verdict with a problem fails the run, and the table names it."""
    verdict = Verdict(counts=dict(COUNTS))
    verdict.add([Problem(kind, "call-7", "is not there")])  # type: ignore[arg-type]

    report = make_report(facts(), SUMMARY, verdict)

    assert (False, 1) == (report["ok"], report[kind])
    assert "call-7: is not there" in as_table(report)


def test_too_little_is_not_ok() -> None:
    """The table says what there was too little of."""
    verdict = Verdict(counts=dict(COUNTS))
    verdict.demand()

    report = make_report(facts(), SUMMARY, verdict)

    assert not report["ok"]
    assert "too little: rollouts certain: 0 of 0" in as_table(report)


def test_process_that_ended_by_itself_or_load_that_was_cut_is_not_ok() -> None:
    """The run proves nothing where a process died of something else, or the ledger has no end."""
    verdict = Verdict(counts=dict(COUNTS))

    assert not make_report(facts(unexpected_exits=[{"name": "w0"}]), SUMMARY, verdict)["ok"]
    assert not make_report(facts(), {}, verdict)["ok"]
