"""Dr.GRPO: A_i = r_i - mean.

Source: arXiv:2503.20783. Its other half is the loss: the sum over tokens divided by a constant, which is build's aggregation
`rollout_sum_constant`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollstream.processors.config import Part
from rollstream.processors.credit.base import CreditResult
from rollstream.processors.credit.baseline import Singleton, against_group
from rollstream.schemas.records import Group, Reward


class DrGrpoConfig(Part):
    """Knobs."""

    singleton: Singleton = "no_baseline"
    """What a lone reward gets."""


def dr_grpo(group: Group, rewards: Sequence[Reward], config: Part, /) -> CreditResult:
    """Dr.GRPO's advantage of each rollout. Args: config: a `DrGrpoConfig`."""
    del group
    return against_group(rewards, center="mean", scale="none", ddof=0, eps=0.0, **config.model_dump())
