"""Batches: shapes, padding, weights whose sum does not depend on how samples are batched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rollstream.errors import TrainerError
from rollstream.schemas.records import Divisor
from rollstream.schemas.types import pack_floats
from rollstream.trainers.collate import collate, step_counts
from tests.unit.trainers.samples import make_sample

torch.set_num_threads(1)


def test_rows_are_padded_on_the_right_by_default() -> None:
    """[B, T] with the documented types."""
    batch = collate([make_sample("a", prompt=2, output=1), make_sample("b", prompt=3, output=2)], pad_id=7)

    assert [[10, 11, 12, 7, 7], [10, 11, 12, 13, 14]] == batch["input_ids"].tolist()
    assert [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]] == batch["attention_mask"].tolist()
    assert [[0, 0, 1, 0, 0], [0, 0, 0, 1, 1]] == batch["mask"].tolist()
    assert [[-1, -1, 5, -1, -1], [-1, -1, -1, 5, 5]] == batch["versions"].tolist()
    assert (torch.int64, torch.float32) == (batch["input_ids"].dtype, batch["loss_weight"].dtype)
    assert ["a", "b"] == batch["sample_ids"]


def test_rows_are_padded_on_the_left_where_asked() -> None:
    """All of a row moves, versions included."""
    batch = collate([make_sample("a", prompt=1, output=1)], pad="left", length=4)

    assert [[0, 0, 10, 11]] == batch["input_ids"].tolist()
    assert [[0, 0, 1, 1]] == batch["attention_mask"].tolist()
    assert [[0, 0, 0, 1]] == batch["mask"].tolist()
    assert [[-1, -1, -1, 5]] == batch["versions"].tolist()
    assert [[0, 0, 0, -0.5]] == batch["logprobs"].tolist()


def test_missing_logprobs_outside_the_mask_become_zero() -> None:
    """NaN never reaches a loss."""
    batch = collate([make_sample("a")])

    assert not torch.isnan(batch["logprobs"]).any()
    assert torch.all(batch["logprobs"][batch["mask"] == 0] == 0)


@pytest.mark.parametrize(
    ("divisor", "expected"),
    [(Divisor.ROLLOUTS, 0.5 / 2), (Divisor.TOKENS, 0.5 / 5), (Divisor.NONE, 0.5)],
)
def test_divisor_is_counted_over_the_step(divisor: Divisor, expected: float) -> None:
    """Three samples of two rollouts, five tokens."""
    samples = [
        make_sample("a", rollout_id="r1", output=2, divisor=divisor),
        make_sample("b", rollout_id="r1", output=2, divisor=divisor),
        make_sample("c", rollout_id="r2", output=1, divisor=divisor),
    ]

    batch = collate(samples)

    assert torch.allclose(batch["loss_weight"][batch["mask"] == 1], torch.tensor(expected))
    assert torch.all(batch["loss_weight"][batch["mask"] == 0] == 0)


def test_micro_batches_with_the_counts_of_the_step_weigh_what_the_step_weighs() -> None:
    """Counting each micro-batch for itself would drift."""
    samples = [make_sample(f"s{i}", rollout_id=f"r{i // 2}", output=i + 1, weight=1 / (i + 1)) for i in range(6)]
    whole = collate(samples)["loss_weight"].sum()

    parts = [collate([sample], counts=step_counts(samples))["loss_weight"].sum() for sample in samples]
    naive = [collate([sample])["loss_weight"].sum() for sample in samples]

    assert torch.isclose(whole, torch.stack(parts).sum())
    assert not torch.isclose(whole, torch.stack(naive).sum())


def test_sampled_token_without_a_logprob_is_refused() -> None:
    """It is never filled with 0."""
    sample = make_sample("a", prompt=1, output=1)
    broken = replace(sample, logprobs=pack_floats([math.nan, math.nan]))

    with pytest.raises(TrainerError, match="sample 'a': a sampled token has no log-probability"):
        collate([broken])


def test_sample_is_never_cut() -> None:
    """A sample that does not fit is an error that says what to do."""
    with pytest.raises(TrainerError, match=r"sample 'a' has 5; it is never cut"):
        collate([make_sample("a")], length=4)


def test_no_samples_make_no_batch() -> None:
    """An empty batch has no shape."""
    with pytest.raises(TrainerError, match="no samples"):
        collate([])
