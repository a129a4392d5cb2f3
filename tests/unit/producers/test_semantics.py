"""Which distribution an engine's log-probabilities belong to."""

from __future__ import annotations

import numpy as np
import pytest

from rollstream.producers.engines.semantics import tell_semantics
from rollstream.schemas.records import LogprobSemantics


def table(logits: list[float], temperature: float) -> dict[object, float]:
    scaled = np.array(logits) / temperature
    logprobs = scaled - np.log(np.exp(scaled).sum())
    return dict(enumerate(logprobs.tolist()))


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (table([2, 1, 0.5], 1), table([2, 1, 0.5], 0.5), LogprobSemantics.PROCESSED),
        (table([2, 1, 0.5], 1), table([2, 1, 0.5], 1), LogprobSemantics.RAW),
        (table([1, 1, 1], 1), table([1, 1, 1], 0.5), LogprobSemantics.UNKNOWN),
        ({0: 2.0, 1: 1.0}, {0: 4.0, 1: 2.0}, LogprobSemantics.UNKNOWN),
        ({0: -1.0}, {0: -0.5}, LogprobSemantics.UNKNOWN),
        ({0: -1.0, 1: -2.0}, {2: -0.5, 3: -2.0}, LogprobSemantics.UNKNOWN),
        ({0: -1.0, 1: -2.0}, {0: -1.0, 1: -2.5}, LogprobSemantics.UNKNOWN),
    ],
)
def test_semantics_are_told_from_two_temperatures(
    first: dict[object, float], second: dict[object, float], found: LogprobSemantics
) -> None:
    """Doubled distances are processed, equal ones raw, and whatever is neither is unknown (logits, ties, other tokens)."""
    assert found == tell_semantics(first, second, ratio=2.0)
