"""The demo's line from agent to explained token, run for a few steps: too few to learn, enough to account for every call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The demo's folder and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-m", "examples.flight_desk.run", "--steps", str(STEPS), "--out", str(out)]
    return out, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def report(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """`report.json`."""
    out, done = demo
    assert (out / "report.json").exists(), done.stdout + done.stderr
    values: dict[str, Any] = json.loads((out / "report.json").read_text())
    return values


@pytest.mark.timeout(600)
def test_demo_accounts_for_every_call(report: dict[str, Any]) -> None:
    """Every started call is in a sample, masked or quarantined, and the audit holds."""
    calls = report["calls"]

    assert report["audit"]["ok"] is True
    assert calls["started"] > 500
    assert calls["started"] == calls["in_samples"] + calls["masked"] + calls["quarantined"]


@pytest.mark.timeout(600)
def test_recorded_log_probability_is_the_policy_version_s(report: dict[str, Any]) -> None:
    """A token of the last batch, scored again under its true prefix by the weights of its version, has its log-probability."""
    token = report["rescored_token"]

    assert abs(token["recorded"] - token["computed"]) < 1e-3
    assert token["version"] >= STEPS - 2


@pytest.mark.timeout(600)
def test_explain_names_the_true_prefix(
    report: dict[str, Any], demo: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    """`rollstream explain SAMPLE:TOKEN` over the folder that the demo left tells the length of the token's prefix."""
    token = report["rescored_token"]
    name = f"{token['sample_id']}:{token['position']}"

    done = subprocess.run(
        [sys.executable, "-m", "rollstream", "explain", name, "--store", f"chdb://{demo[0] / 'clickhouse'}"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert f"prefix   {token['position']} tokens" in done.stdout


@pytest.mark.timeout(600)
def test_demo_that_did_not_learn_says_so(
    report: dict[str, Any], demo: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    """A few steps do not reach the goal: exit code 1, and the report says why."""
    assert report["success"]["learned"] is False
    assert demo[1].returncode == 1
