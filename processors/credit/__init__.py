"""Credit methods by name. A new one: a file beside this one, and a line in `METHODS`."""

from __future__ import annotations

from rollstream.processors.credit.base import CreditFunction, CreditResult, Method
from rollstream.processors.credit.dr_grpo import DrGrpoConfig, dr_grpo
from rollstream.processors.credit.grpo import GrpoConfig, grpo
from rollstream.processors.credit.rloo import RlooConfig, rloo

METHODS: dict[str, Method] = {
    "grpo": Method(grpo, GrpoConfig, 1),
    "dr_grpo": Method(dr_grpo, DrGrpoConfig, 1),
    "rloo": Method(rloo, RlooConfig, 1),
}
"""Name in the pipeline file → method."""

__all__ = ["METHODS", "CreditFunction", "CreditResult", "Method"]
