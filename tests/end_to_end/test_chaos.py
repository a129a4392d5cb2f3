"""The short form of `make chaos`: every kind of fault once, and nothing lost, doubled or wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.schedule import KINDS
from tests.services import ROOT

MINUTES = 1.0
CALLS_PER_S = 40
DEADLINE_S = 60  # several times what a rollout takes, so that not the deadlines decide what becomes of most
LEAST_CALLS = 500
LEAST_TRAINED = 0.4
"""Of the acknowledged calls, in samples; the others are of agents that vanished or groups that a fault made too late."""


@pytest.mark.kafka
@pytest.mark.timeout(900)
def test_nothing_is_lost_doubled_or_wrong_under_every_kind_of_fault(tmp_path: Path) -> None:
    """Whatever breaks, what clients were told is stored once and right, and every call has its place."""
    out = tmp_path / "chaos"
    options = ["--minutes", MINUTES, "--seed", 3, "--rate", CALLS_PER_S, "--deadline-s", DEADLINE_S, "--out", out]

    done = subprocess.run(
        [sys.executable, "-m", "chaos.run", *map(str, options)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    told = done.stdout[-8_000:] + done.stderr[-4_000:]
    assert (out / "report.json").exists(), told
    report = json.loads((out / "report.json").read_text("utf-8"))
    faults = report["faults"]
    assert (report["lost"], report["doubled"], report["wrong"]) == (0, 0, 0), told
    assert set(faults["by_kind"]) == {kind.name for kind in KINDS} - set(faults["left_out"]), told
    assert report["calls"]["acknowledged"] >= LEAST_CALLS, told
    assert report["stored"]["calls in samples"] >= LEAST_TRAINED * report["calls"]["acknowledged"], told
    assert done.returncode == 0, told
