"""Samples to padded torch tensors.

Denominators belong to an optimizer step, not to what fits a device at once: count them over the step (`step_counts`) and
pass them to every micro-batch, or each micro-batch normalises itself and the weights drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from rollstream.errors import TrainerError
from rollstream.schemas.records import Divisor, Sample
from rollstream.schemas.types import unpack_floats, unpack_ids, unpack_mask

if TYPE_CHECKING:
    import torch


class Batch(TypedDict):
    """B samples, padded to T tokens. The loss of the step is `(loss * loss_weight).sum()`, summed over its micro-batches."""

    input_ids: torch.Tensor
    """[B, T] int64; `pad_id` where padded."""
    attention_mask: torch.Tensor
    """[B, T] int64; 1 on tokens, 0 on padding."""
    mask: torch.Tensor
    """[B, T] float32; 1 on sampled tokens."""
    logprobs: torch.Tensor
    """[B, T] float32; rollout log-probability of the token at this position, 0 where mask is 0."""
    advantages: torch.Tensor
    """[B, T] float32; 0 where mask is 0."""
    loss_weight: torch.Tensor
    """[B, T] float32; the token's whole weight, divisor applied; 0 where mask is 0."""
    versions: torch.Tensor
    """[B, T] int64; policy version that sampled the token, -1 where mask is 0."""
    sample_ids: list[str]
    """[B] ids, in the order of the rows."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What an optimizer step is divided by."""

    rollouts: int
    """R: distinct rollouts."""
    tokens: int
    """N: sampled tokens."""


def step_counts(samples: Iterable[Sample]) -> StepCounts:
    """Count the samples of a whole optimizer step."""
    rollouts: set[tuple[str, int, str]] = set()
    tokens = 0
    for sample in samples:
        rollouts.add((sample.rollout_id, sample.rollout_attempt, sample.pipeline_digest))
        tokens += sample.sampled_tokens
    return StepCounts(len(rollouts), tokens)


def collate(
    samples: Sequence[Sample],
    *,
    pad_id: int = 0,
    pad: Literal["left", "right"] = "right",
    counts: StepCounts | None = None,
    length: int | None = None,
) -> Batch:
    """Make a batch. A tensor entry at position t belongs to the token at t: its logit is the one at t - 1.

    Args:
        pad_id: token id of padding.
        pad: which side is padded.
        counts: of the whole optimizer step; None counts `samples`, which is right only if they are the whole step.
        length: T; None takes the longest sample's.

    Raises: TrainerError: there are no samples, one is longer than `length`, or a sampled token has no log-probability.
    """
    import torch

    if not samples:
        raise TrainerError("cannot make a batch of no samples", reason="no_samples")
    counts = counts or step_counts(samples)
    longest = max(samples, key=lambda sample: len(sample.mask))
    width = len(longest.mask) if length is None else length
    if len(longest.mask) > width:
        raise TrainerError(
            f"cannot make a batch of {width} tokens: sample {longest.sample_id!r} has {len(longest.mask)}; it is never cut, so "
            "raise the length or leave its group out",
            reason="sample_too_long",
        )
    shape = (len(samples), width)
    ids = np.full(shape, pad_id, dtype=np.int64)
    attention = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.float32)
    logprobs = np.zeros(shape, dtype=np.float32)
    advantages = np.zeros(shape, dtype=np.float32)
    weights = np.zeros(shape, dtype=np.float32)
    versions = np.full(shape, -1, dtype=np.int64)
    for row, sample in enumerate(samples):
        sampled = unpack_mask(sample.mask).astype(bool)
        start = width - len(sampled) if pad == "left" else 0
        at = slice(start, start + len(sampled))
        lp = unpack_floats(sample.logprobs)
        if not np.isfinite(lp[sampled]).all():
            raise TrainerError(
                f"cannot train on sample {sample.sample_id!r}: a sampled token has no log-probability; run `rollstream audit`",
                reason="logprob_missing",
            )
        ids[row, at] = unpack_ids(sample.ids)
        attention[row, at] = 1
        mask[row, at] = sampled
        logprobs[row, at] = np.where(sampled, lp, 0.0)
        advantages[row, at] = np.where(sampled, unpack_floats(sample.advantages), 0.0)
        weights[row, at] = np.where(sampled, sample.loss_weight / _divisor(sample, counts), 0.0)
        for span in sample.versions:
            versions[row, start + span.start : start + span.end] = span.version
        versions[row, at][~sampled] = -1
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(attention),
        "mask": torch.from_numpy(mask),
        "logprobs": torch.from_numpy(logprobs),
        "advantages": torch.from_numpy(advantages),
        "loss_weight": torch.from_numpy(weights),
        "versions": torch.from_numpy(versions),
        "sample_ids": [sample.sample_id for sample in samples],
    }


def _divisor(sample: Sample, counts: StepCounts) -> float:
    if sample.divisor is Divisor.ROLLOUTS:
        return float(counts.rollouts)
    if sample.divisor is Divisor.TOKENS:
        return float(counts.tokens)
    return 1.0
