"""Scorers by kind. A new one: a file beside this one, and a line in `KINDS`."""

from __future__ import annotations

from typing import Any

from rollstream.processors.config import ScorerConfig
from rollstream.processors.scorers.base import Scorer, Verdict
from rollstream.processors.scorers.environment_outcome import EnvironmentOutcome
from rollstream.processors.scorers.exact_match import ExactMatch
from rollstream.processors.scorers.function import FunctionScorer

KINDS: dict[str, Any] = {
    "environment_outcome": EnvironmentOutcome,
    "exact_match": ExactMatch,
}
"""Kind → class (`base.BuiltIn`)."""


def make_scorer(spec: ScorerConfig) -> Scorer:
    """The scorer that a part of the pipeline file names; `kind` is in `KINDS` or `package.module:function`.

    Raises: SettingsError: a function cannot be imported or does not take its configuration.
    """
    if ":" in spec.kind:
        return FunctionScorer(spec.kind, spec.config)
    kind = KINDS[spec.kind]
    scorer: Scorer = kind(kind.Config(**spec.config))
    return scorer


__all__ = ["KINDS", "Scorer", "Verdict", "make_scorer"]
