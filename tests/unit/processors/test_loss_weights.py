"""Loss weights: the table of credit.md, and that a rollout's share is its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollstream.processors.loss_weights import loss_weight
from rollstream.schemas.records import Aggregation, Divisor

VECTORS = json.loads((Path(__file__).parent / "credit" / "vectors.json").read_text())
TOKENS = VECTORS["trained_tokens"]


@pytest.mark.parametrize(
    ("aggregation", "constant", "expected"),
    [
        (Aggregation.TOKEN_MEAN, None, [VECTORS["weights_per_token"]["token_mean"]] * 4),
        (Aggregation.TOKEN_SUM, None, [1.0] * 4),
        (Aggregation.ROLLOUT_MEAN, None, VECTORS["weights_per_token"]["rollout_mean"]),
        (Aggregation.ROLLOUT_SUM, None, [VECTORS["weights_per_token"]["rollout_sum"]] * 4),
        (Aggregation.ROLLOUT_SUM_CONSTANT, 8.0, [VECTORS["weights_per_token"]["rollout_sum_norm_C8"]] * 4),
    ],
)
def test_weight_over_its_divisor_is_the_reference_weight(
    aggregation: Aggregation, constant: float | None, expected: list[float]
) -> None:
    """What build writes, divided by what the trainer counts in its step, is the weight of the definition."""
    found = [loss_weight(aggregation, tokens, constant) for tokens in TOKENS]

    counts = {Divisor.NONE: 1, Divisor.ROLLOUTS: len(TOKENS), Divisor.TOKENS: sum(TOKENS)}
    assert pytest.approx(expected) == [weight / counts[divisor] for weight, divisor in found]


def test_every_aggregation_has_a_divisor() -> None:
    """A new aggregation cannot be forgotten here."""
    assert all(loss_weight(aggregation, 3, 8.0)[0] > 0 for aggregation in Aggregation)
