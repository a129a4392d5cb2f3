"""What the end of a command, and of the check behind it, says about its rollout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollstream.producers.harnesses.child import Ended
from rollstream.schemas.records import RolloutStatus


class ErrorIs(StrEnum):
    """What an exit code other than 0 of the command means."""

    FAILED = "failed"
    """The agent did not do its task."""
    ABORTED = "aborted"
    """Something outside of the agent broke, for instance its connection: no reward, so nothing is learned from it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rollout ends."""

    status: RolloutStatus
    """Its status."""
    outcome: dict[str, Any]
    """What scorers read."""
    exit_code: int
    """What our own process ends with."""


def needs_check(command: Ended, error_is: ErrorIs) -> bool:
    """Whether there is something to check: an agent that ran out of time may have done its task before."""
    return command.because != "signal" and not _is_aborted(command, error_is)


def judge(command: Ended, error_is: ErrorIs, check: Ended | None = None, printed: str = "") -> Verdict:
    """The check decides where there is one, else the exit code: reward 1.0 for 0, and 0.0 for all others.

    Args: printed: what the check wrote; a JSON object is part of the outcome, so that it may say another `reward`.
    """
    ends = [end for end in (command, check) if end is not None]
    exit_code = next((_exit_code(end) for end in ends if _exit_code(end)), 0)
    outcome: dict[str, Any] = {"exit_code": command.exit_code if command.because == "exit" else None}
    if any(end.because == "signal" for end in ends) or _is_aborted(command, error_is):
        return Verdict(RolloutStatus.ABORTED, outcome, exit_code)
    if check is not None:
        outcome["check_exit_code"] = check.exit_code if check.because == "exit" else None
    is_done = (check or command) == Ended(0)
    outcome = {"reward": float(is_done), **outcome, **_object(printed)}
    if command.because == "timeout":
        return Verdict(RolloutStatus.TRUNCATED, outcome, exit_code)
    return Verdict(RolloutStatus.SUCCEEDED if is_done else RolloutStatus.FAILED, outcome, exit_code)


def _is_aborted(command: Ended, error_is: ErrorIs) -> bool:
    return error_is is ErrorIs.ABORTED and command.because == "exit" and command.exit_code != 0


def _exit_code(end: Ended) -> int:
    return 124 if end.because == "timeout" else end.exit_code  # 124 as timeout(1)


def _object(printed: str) -> dict[str, Any]:
    try:
        value = json.loads(printed)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
