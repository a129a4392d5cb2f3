"""What a comparison reports, and what of the pipeline it goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lost", "doubled", "wrong"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be."""

    kind: Kind
    """What it is."""
    about: str
    """Whose: a call, event, rollout, group or sample."""
    message: str
    """What was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What of the pipeline decides what must come out; the credit method is `grpo` with `center: mean, scale: group_std`."""

    join_deadline_ms: int = 120_000
    """Deadline of a rollout."""
    group_deadline_ms: int = 120_000
    """Deadline of a group."""
    clip: tuple[float, float] = (-10.0, 10.0)
    """Lowest and highest reward."""
    ddof: int = 1
    """Subtracted from the count in the standard deviation."""
    eps: float = 1e-6
    """Added to the standard deviation."""
