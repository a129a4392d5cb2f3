"""How benchmarks measure and report: a table for people, JSON for comparisons.

A figure is the median of `n` runs with the 99th percentile beside it; the report names machine and commit, without which a
figure says nothing.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

OUT = Path("out/benchmarks")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a report."""

    what: str
    """What was measured."""
    n: int
    """Runs."""
    median_us: float
    """Median of a run, microseconds."""
    p99_us: float
    """99th percentile, microseconds."""
    note: str = ""
    """What else was counted, for instance bytes."""


def measure(what: str, run: Callable[[], object], *, seconds: float = 0.5, note: str = "") -> Figure:
    """Run something for a while, at least ten times, after one run that does not count."""
    run()
    times_ns: list[int] = []
    end_ns = time.perf_counter_ns() + int(seconds * 1e9)
    while len(times_ns) < 10 or time.perf_counter_ns() < end_ns:
        began_ns = time.perf_counter_ns()
        run()
        times_ns.append(time.perf_counter_ns() - began_ns)
    median, p99 = np.percentile(times_ns, [50, 99]) / 1e3
    return Figure(what, len(times_ns), float(median), float(p99), note)


def report(name: str, figures: list[Figure]) -> None:
    """Print a table, and write `out/benchmarks/<name>.json`."""
    where = {"machine": _machine(), "python": platform.python_version(), "commit": _commit()}
    print(f"{name}: {where['machine']}, Python {where['python']}, commit {where['commit']}")
    width = max(len(figure.what) for figure in figures)
    print(f"{'':{width}}  {'n':>7}  {'median µs':>11}  {'p99 µs':>11}")
    for f in figures:
        print(f"{f.what:{width}}  {f.n:7}  {f.median_us:11.1f}  {f.p99_us:11.1f}  {f.note}".rstrip())
    print()
    OUT.mkdir(parents=True, exist_ok=True)
    content = {**where, "figures": [asdict(figure) for figure in figures]}
    (OUT / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _machine() -> str:
    model = ""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        model = next((li.partition(":")[2].strip() for li in info.read_text().splitlines() if "model name" in li), "")
    return f"{model or platform.processor() or 'unknown CPU'} ({platform.machine()})"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"
