"""What exit codes, deadlines and checks make of a rollout."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.producers.harnesses.child import Ended
from rollstream.producers.harnesses.verdict import ErrorIs, judge, needs_check
from rollstream.schemas.records import RolloutStatus

DONE, ERROR, LATE, STOPPED = Ended(0), Ended(3), Ended(137, "timeout"), Ended(143, "signal")


@pytest.mark.parametrize(
    ("command", "check", "error_is", "status", "reward", "exit_code"),
    [
        (DONE, None, "failed", "succeeded", 1.0, 0),
        (ERROR, None, "failed", "failed", 0.0, 3),
        (ERROR, None, "aborted", "aborted", None, 3),
        (LATE, None, "failed", "truncated", 0.0, 124),
        (LATE, None, "aborted", "truncated", 0.0, 124),
        (Ended(0, "timeout"), None, "failed", "truncated", 0.0, 124),
        (STOPPED, None, "failed", "aborted", None, 143),
        (DONE, DONE, "failed", "succeeded", 1.0, 0),
        (DONE, Ended(1), "failed", "failed", 0.0, 1),
        (ERROR, DONE, "failed", "succeeded", 1.0, 3),
        (ERROR, Ended(1), "failed", "failed", 0.0, 3),
        (LATE, DONE, "failed", "truncated", 1.0, 124),
        (LATE, Ended(1), "failed", "truncated", 0.0, 124),
        (DONE, LATE, "failed", "failed", 0.0, 124),
        (DONE, STOPPED, "failed", "aborted", None, 143),
    ],
)
def test_verdict(
    command: Ended, check: Ended | None, error_is: str, status: str, reward: float | None, exit_code: int
) -> None:
    """The check decides where there is one; what the agent had no part in has no reward."""
    verdict = judge(command, ErrorIs(error_is), check)

    assert (RolloutStatus(status), reward, exit_code) == (
        verdict.status,
        verdict.outcome.get("reward"),
        verdict.exit_code,
    )


@pytest.mark.parametrize(
    ("command", "error_is", "is_needed"),
    [
        (DONE, "failed", True),
        (ERROR, "failed", True),
        (ERROR, "aborted", False),
        (LATE, "aborted", True),
        (STOPPED, "failed", False),
    ],
)
def test_check_runs_where_it_can_say_something(command: Ended, error_is: str, is_needed: bool) -> None:
    """An aborted rollout has no reward whatever a check says; one that ran out of time may be done."""
    assert is_needed == needs_check(command, ErrorIs(error_is))


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        ("", {"reward": 0.0}),
        ("3 passed, 1 failed\n", {"reward": 0.0}),
        ("0.75", {"reward": 0.0}),
        ('{"reward": 0.75, "passed": 3}\n', {"reward": 0.75, "passed": 3}),
    ],
)
def test_object_that_a_check_prints_is_part_of_the_outcome(printed: str, outcome: dict[str, Any]) -> None:
    """So a check may give part of the reward; other output is only output."""
    verdict = judge(DONE, ErrorIs.FAILED, Ended(1), printed)

    assert {"exit_code": 0, "check_exit_code": 1, **outcome} == verdict.outcome
