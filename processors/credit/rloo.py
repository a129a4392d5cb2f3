"""RLOO: A_i = r_i - mean of the others' rewards = n / (n - 1) (r_i - mean).

Source: arXiv:2402.14740; verl `core_algos.compute_rloo_outcome_advantage`. The paper's KL in the reward is not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollstream.processors.config import Part
from rollstream.processors.credit.base import CreditResult
from rollstream.processors.credit.baseline import Singleton, against_group
from rollstream.schemas.records import Group, Reward


class RlooConfig(Part):
    """Knobs."""

    singleton: Singleton = "no_baseline"
    """What a lone reward gets."""


def rloo(group: Group, rewards: Sequence[Reward], config: Part, /) -> CreditResult:
    """RLOO's advantage of each rollout. Args: config: a `RlooConfig`."""
    del group
    return against_group(rewards, center="loo", scale="none", ddof=0, eps=0.0, **config.model_dump())
