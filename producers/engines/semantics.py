"""Which distribution an engine's log-probabilities belong to, told from two answers. Pure.

At half the temperature the distances between log-probabilities double, unless they are the model's own, which no temperature
changes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from rollstream.schemas.records import LogprobSemantics

_EQUAL = 1e-3
"""Two answers to one prompt differ by rounding of this size; bfloat16 servers compute logits once and cast them alike."""
_RELATIVE = 0.05


def tell_semantics(
    first: Mapping[Hashable, float], second: Mapping[Hashable, float], *, ratio: float
) -> LogprobSemantics:
    """Raw, processed or unknown.

    Args: first: log-probabilities of the likeliest tokens after a prompt, by token. second: the same after the same prompt, at a
        temperature `ratio` times lower.

    Returns: unknown where fewer than two tokens are in both, they are equally likely, or they are no log-probabilities at all.
    """
    shared = [token for token in first if token in second]
    if len(shared) < 2 or any(_mass(table) > 1 + _EQUAL for table in (first, second)):
        return LogprobSemantics.UNKNOWN
    low, high = min(shared, key=first.__getitem__), max(shared, key=first.__getitem__)
    before, after = first[high] - first[low], second[high] - second[low]
    if before < 4 * _EQUAL:
        return LogprobSemantics.UNKNOWN
    if all(abs(first[token] - second[token]) < _EQUAL for token in shared):
        return LogprobSemantics.RAW
    if abs(after - ratio * before) < _RELATIVE * ratio * before + _EQUAL:
        return LogprobSemantics.PROCESSED
    return LogprobSemantics.UNKNOWN


def _mass(table: Mapping[Hashable, float]) -> float:
    return math.fsum(math.exp(min(value, 1.0)) for value in table.values())
