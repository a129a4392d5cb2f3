"""GRPO: A_i = (r_i - mean) / (std + eps).

Source: arXiv:2402.03300; verl `core_algos.compute_grpo_outcome_advantage` (defaults). Leave-one-out center and scale are
NeMo-RL's defaults. There is no length normalisation in A, and a KL term belongs to the trainer's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rollstream.processors.config import Part
from rollstream.processors.credit.base import CreditResult
from rollstream.processors.credit.baseline import Center, Scale, Singleton, against_group
from rollstream.schemas.records import Group, Reward


class GrpoConfig(Part):
    """Knobs."""

    center: Center = "mean"
    """What is subtracted: the group's mean, or that of the others."""
    scale: Scale = "group_std"
    """What it is divided by: the group's standard deviation, the others', or nothing."""
    ddof: Literal[0, 1] = 1
    """1 divides the squares by n - 1 (torch's default), 0 by n (numpy's)."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation. TRL uses 1e-4."""
    singleton: Singleton = "no_baseline"
    """What a lone reward gets."""


def grpo(group: Group, rewards: Sequence[Reward], config: Part, /) -> CreditResult:
    """GRPO's advantage of each rollout. Args: config: a `GrpoConfig`."""
    del group
    return against_group(rewards, **config.model_dump())
