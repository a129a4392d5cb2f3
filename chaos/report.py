"""The result of a chaos run: one JSON file for machines, one table for people.

`report.json` holds, in this order:

    machine       cores, memory, CPU, system and Python (of `platform`), and the load average at the end
    commit        the commit that was tested; `dirty` true if files differed from it
    seed, minutes as given
    ok            true if nothing is lost, doubled or wrong, enough was compared, and no process ended by itself
    faults        {"total": n, "by_kind": {kind: n}, "left_out": {kind: why}}
    calls, rollouts, groups                     what the ledger says: {"requested", "acknowledged", ...}
    stored        what was compared, by name (`Verdict.counts`)
    lost, doubled, wrong, twins                 numbers; a twin is a copy of equal bytes, which is no error
    too_little    what was compared too little of to prove anything, in words
    problems      the first problems of each kind: {"kind", "about", "message"}
    unexpected_exits   processes that ended without a fault having ended them
    recovery_s    {kind: {"count", "median", "p99", "longest", "not_seen"}}, seconds; a p99 of few is their longest
    throughput    {"calls_per_s", "seconds"}    acknowledged calls over the time of the load
    facts         whatever else the run was told to add
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from chaos.compare import Verdict
from chaos.ledger import Line


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the run knows, beside what was compared."""

    seed: int
    """Of schedule and load."""
    minutes: float
    """How long faults were injected."""
    faults: Sequence[tuple[str, float | None]]
    """Kind of each fault, and seconds until its victim worked again; None where that was not seen."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Kinds that could not be injected here, and why."""
    unexpected_exits: Sequence[Any] = ()
    """Processes that ended by themselves."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping."""


def make_report(facts: RunFacts, summary: Line, verdict: Verdict, *, folder: Path | None = None) -> dict[str, Any]:
    """The report. Args: summary: the ledger's last line. folder: of the repository; None for the current one."""
    counts = verdict.counts
    seconds = float(summary.get("seconds") or 0)
    acknowledged = counts.get("calls acknowledged", 0)
    return {
        "machine": _machine(),
        "commit": _commit(folder),
        "seed": facts.seed,
        "minutes": facts.minutes,
        "ok": verdict.ok and not facts.unexpected_exits and bool(summary),
        "faults": {
            "total": len(facts.faults),
            "by_kind": dict(sorted(Counter(kind for kind, _ in facts.faults).items())),
            "left_out": dict(facts.left_out),
        },
        "calls": {"requested": counts.get("calls requested", 0), "acknowledged": acknowledged},
        "rollouts": {
            "played": counts.get("rollouts", 0),
            **{
                name.removeprefix("rollouts "): number
                for name, number in summary.items()
                if name.startswith("rollouts ")
            },
        },
        "groups": {"played": counts.get("groups", 0), "full": counts.get("groups full", 0)},
        "stored": dict(counts),
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "wrong": verdict.wrong,
        "twins": verdict.twins,
        "too_little": list(verdict.too_little),
        "problems": [asdict(problem) for problem in verdict.examples],
        "unexpected_exits": list(facts.unexpected_exits),
        "recovery_s": recovery_times(facts.faults),
        "throughput": {"calls_per_s": round(acknowledged / seconds, 1) if seconds else None, "seconds": seconds},
        "facts": dict(facts.more),
    }


def recovery_times(faults: Iterable[tuple[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Median, p99 and longest by kind, seconds; the p99 is the smallest time that 99 of 100 do not exceed."""
    by_kind: dict[str, list[float | None]] = defaultdict(list)
    for kind, took_s in faults:
        by_kind[kind].append(took_s)
        by_kind["all"].append(took_s)
    found = {}
    for kind, times in sorted(by_kind.items()):
        seen = sorted(took_s for took_s in times if took_s is not None)
        found[kind] = {
            "count": float(len(times)),
            "median": round(statistics.median(seen), 2) if seen else None,
            "p99": round(seen[math.ceil(0.99 * len(seen)) - 1], 2) if seen else None,
            "longest": round(seen[-1], 2) if seen else None,
            "not_seen": float(len(times) - len(seen)),
        }
    return found


def write_report(report: Mapping[str, Any], file: Path) -> None:
    """Store it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2, default=str) + b"\n")


def as_table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    machine, commit, faults = report["machine"], report["commit"], report["faults"]
    lines = [
        f"machine     {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        f"commit      {commit['id'][:12]}{' and changes' if commit['dirty'] else ''}",
        f"seed        {report['seed']}, {report['minutes']:g} minutes",
        f"load        {_told(report['calls'])} calls, {_told(report['rollouts'])} rollouts, {_told(report['groups'])} groups",
        f"throughput  {report['throughput']['calls_per_s']} calls/s",
        f"faults      {faults['total']}",
        "",
        f"{'fault':24}{'count':>7}{'median s':>10}{'p99 s':>8}{'longest s':>11}{'not seen':>10}",
    ]
    for kind, times in report["recovery_s"].items():
        cells = (times["median"], times["p99"], times["longest"])
        median, p99, longest = ("-" if cell is None else f"{cell:.1f}" for cell in cells)
        lines.append(f"{kind:24}{times['count']:7.0f}{median:>10}{p99:>8}{longest:>11}{times['not_seen']:10.0f}")
    lines += [f"left out: {kind}: {why}" for kind, why in faults["left_out"].items()]
    lines += ["", f"{'lost':>8}{'doubled':>9}{'wrong':>7}{'twins':>7}{'unexpected exits':>18}"]
    lines.append(
        f"{report['lost']:8}{report['doubled']:9}{report['wrong']:7}{report['twins']:7}{len(report['unexpected_exits']):18}"
    )
    lines += [f"{one['kind']:8} {one['about']}: {one['message']}" for one in report["problems"]]
    lines += [f"too little: {one}" for one in report["too_little"]]
    lines.append("ok" if report["ok"] else "FAILED")
    return "\n".join(lines)


def _told(counts: Mapping[str, int]) -> str:
    return " / ".join(f"{number} {name}" for name, number in counts.items())


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _commit(folder: Path | None) -> dict[str, Any]:
    return {
        "id": _git(folder, "rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git(folder, "status", "--porcelain")),
    }


def _git(folder: Path | None, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
