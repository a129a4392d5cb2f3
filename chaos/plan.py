"""What agents mean to do, drawn from a seed: groups, their rollouts, and each call. Pure.

What a group does follows from the seed and its number alone; `load.py` plays it against gateways that break.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = (
    "add",
    "move",
    "open",
    "close",
    "read",
    "write",
    "test",
    "build",
    "merge",
    "split",
    "wait",
    "send",
    "look",
    "turn",
)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of a rollout."""

    say: str
    """What the user message adds."""
    is_stream: bool
    max_tokens: int
    seed: int | None
    leaves_after_s: float | None
    """The client closes the connection this long after asking, and asks again."""
    events: int
    """Environment events after it."""
    repeats_event: bool
    """Its events are sent twice, as by a client whose answer was lost."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What an agent means to do."""

    rollout_id: str
    calls: tuple[CallPlan, ...]
    temperature: float
    status: str
    reward: float | None
    """None: the outcome names none."""
    ending: str
    """`finish`, `vanish` or `supersede`: after half of its calls a new attempt starts from the beginning."""
    finishes_twice: bool
    calls_late: bool
    """One more call after the finish."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group."""

    group_id: str
    task_id: str
    rollouts: tuple[RolloutPlan, ...]


def plan_group(seed: int, number: int) -> GroupPlan:
    """The group with this number; equal arguments give an equal plan."""
    dice = random.Random(f"{seed}/{number}")
    group_id = f"g{seed}-{number:06}"
    size = dice.choices((4, 2, 3, 6, 8), (70, 10, 8, 6, 6))[0]
    is_flat = dice.random() < 0.05
    rollouts = tuple(_plan_rollout(dice, f"{group_id}-{at}", is_flat) for at in range(size))
    return GroupPlan(group_id, f"task-{number % 97}", rollouts)


def _plan_rollout(dice: random.Random, rollout_id: str, is_flat: bool) -> RolloutPlan:
    is_empty = dice.random() < 0.01
    return RolloutPlan(
        rollout_id=rollout_id,
        calls=() if is_empty else tuple(_plan_call(dice) for _ in range(dice.randint(2, 10))),
        temperature=dice.choices((1.0, 0.7), (90, 10))[0],
        status=dice.choices(("succeeded", "failed", "truncated", "aborted"), (80, 14, 5, 1))[0],
        reward=None if dice.random() < 0.01 else 1.0 if is_flat else round(dice.uniform(-1, 1), 3),
        ending=dice.choices(("finish", "vanish", "supersede"), (970, 10, 20))[0],
        finishes_twice=dice.random() < 0.03,
        calls_late=dice.random() < 0.02,
    )


def _plan_call(dice: random.Random) -> CallPlan:
    return CallPlan(
        say=" ".join(dice.choices(_WORDS, k=dice.randint(3, 20))),
        is_stream=dice.random() < 0.5,
        max_tokens=dice.choice((16, 32, 64)),
        seed=dice.randrange(2**31) if dice.random() < 0.5 else None,
        leaves_after_s=dice.uniform(0.005, 0.25) if dice.random() < 0.03 else None,
        events=dice.choices((0, 1, 2), (50, 40, 10))[0],
        repeats_event=dice.random() < 0.03,
    )
