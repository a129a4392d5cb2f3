"""Scorers as a user would write them, imported by name from the pipeline."""

from __future__ import annotations

import asyncio
import threading

from rollstream.processors.scorers import Verdict
from rollstream.schemas.records import Rollout

RELEASE = threading.Event()
"""Set by a test to let `stuck` end."""


def count_calls(rollout: Rollout, weight: float = 1.0) -> float:
    """Number of calls, weighted."""
    return weight * len(rollout.calls)


async def explained(rollout: Rollout) -> Verdict:
    """A number with a reason."""
    return Verdict(0.5, {"seen": rollout.rollout_id})


def stuck(rollout: Rollout) -> float:
    """Does not return until a test lets it."""
    RELEASE.wait()
    return 0.0


async def deaf(rollout: Rollout) -> float:
    """Goes on when it is cancelled."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()
    return 0.0


def broken(rollout: Rollout) -> float:
    """Raises."""
    raise ZeroDivisionError("no luck")


def quits(rollout: Rollout) -> float:
    """Ends the process, as a grader does that was a script once."""
    raise SystemExit(2)


async def quits_later(rollout: Rollout) -> float:
    """The same, on the event loop."""
    raise SystemExit(2)


def babbles(rollout: Rollout) -> float:
    """Raises with bytes of a file in the message."""
    raise ValueError("\udcff" + "x" * 100_000)


def not_a_number(rollout: Rollout) -> float:
    """NaN."""
    return float("nan")


def a_string(rollout: Rollout) -> str:
    """Not a number either."""
    return "good"


def nothing(rollout: Rollout) -> None:
    """No verdict."""


def a_bool(rollout: Rollout) -> bool:
    """Counts as 1."""
    return True


not_callable = 3
