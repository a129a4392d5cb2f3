"""What a credit method is: a pure function from a group and its rewards to one advantage per rollout, call or span.

Rules that all methods keep (after the table of public implementations in the docs):

* Statistics are taken over rollouts, before build; never over training rows.
* A rollout without a reward takes no part in them and gets status `excluded`; it is never counted as 0.
* Fewer than two rewards are `no_baseline`; rewards that differ by at most `SPREAD` are `no_spread`, with an advantage of
  exactly 0, since a standard deviation of rounding noise is not a scale.
* float64 and `math.fsum` over rollouts sorted by id: the order of arrival changes no bit.

Adding a method: a file with a function and its `Config`, a line in `METHODS`, vectors in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.processors.config import Part
from rollstream.schemas.records import Credit, CreditScope, CreditStatistics, Group, Reward

SPREAD = 1e-9
"""Rewards closer together than this are equal."""


@dataclass(frozen=True, slots=True)
class CreditResult:
    """What a method says about a group."""

    scope: CreditScope
    """What a value applies to."""
    credits: tuple[Credit, ...]
    """Sorted by rollout_id, then by call order."""
    statistics: CreditStatistics
    """What the values were compared with."""


class CreditFunction(Protocol):
    """A credit method."""

    def __call__(self, group: Group, rewards: Sequence[Reward], config: Part, /) -> CreditResult:
        """Args: rewards: one a member, sorted by rollout_id. config: the method's resolved `Config`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A credit method that the pipeline file may name."""

    run: CreditFunction
    """The function."""
    config: type[Part]
    """Its knobs."""
    version: int
    """Counted up whenever the code changes what it says."""
