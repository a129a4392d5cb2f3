"""One optimizer step of group-relative policy optimisation on a padded batch of sample rows.

A row is a rollout, or a part of one: all calls whose prompt continues the call before are merged into it. The arrays
carry what the sample topic carries, token by token, so nothing is recomputed here but the current log-probabilities.
Invariant: only tokens with mask 1 are in the loss, each with its own weight, and rows are never re-weighted by the way
they were batched. Called by the demo's trainer process.

Source: the clipped objective of arXiv:1707.06347 with the group advantage of arXiv:2402.03300 and the two-sided clip
of arXiv:2503.14476.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM


@dataclass(frozen=True, slots=True)
class Batch:
    """Sample rows padded on the right to one length; every array has shape [B, T]."""

    input_ids: Tensor
    """Token ids; any id where padded."""
    mask: Tensor
    """1 on the tokens that the policy sampled, 0 elsewhere."""
    old_logprobs: Tensor
    """Log-probability under which the token at this position was sampled; ignored where the mask is 0."""
    advantages: Tensor
    """Advantage of the token."""
    weights: Tensor
    """Loss weight of the token."""

    def take(self, rows: Tensor) -> Batch:
        """The named rows, cut to the longest of them as far as the mask reaches."""
        mask = self.mask[rows]
        longest = int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1
        parts = (self.input_ids, self.mask, self.old_logprobs, self.advantages, self.weights)
        return Batch(*(part[rows, :longest] for part in parts))


@dataclass(frozen=True, slots=True)
class Clip:
    """How far the probability ratio may move before its gradient stops."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """Means over the tokens of all minibatches of one step; zeros when nothing could be learned."""

    rows: int = 0
    """Rows that had an advantage, each counted once."""
    loss: float = 0.0
    entropy: float = 0.0
    """In nats, of the distributions from which tokens were sampled."""
    clipped: float = 0.0
    """Share of tokens whose gradient the clip stopped."""
    ratio_error: float = 0.0
    """Mean absolute log ratio of the first minibatch: rollout against current policy, before this step moves it."""
    grad_norm: float = 0.0


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer that `train_step` expects; it lives as long as the trainer."""
    return torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


def train_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    epochs: int,
    minibatch_rows: int,
    clip: Clip,
    entropy: float = 0.0,
    full_rate_rows: int = 1,
    max_grad_norm: float = 1.0,
    generator: torch.Generator | None = None,
) -> StepStats:
    """Update the model in place; rows without any advantage are left out.

    Args:
        epochs: passes over the rows.
        minibatch_rows: rows of one gradient step; the last one of a pass may have fewer.
        entropy: weight of the entropy bonus.
        full_rate_rows: rows at which the step has the optimizer's full learning rate; with fewer the rate is lowered in
            proportion, because Adam makes steps of one size from any gradient, also from one group's noise.
        generator: decides the order of the rows.
    """
    batch = batch.take(((batch.advantages * batch.mask) != 0).any(1).nonzero().flatten())
    rows = len(batch.input_ids)
    total_weight = (batch.weights * batch.mask).sum()
    if rows == 0 or total_weight <= 0:
        return StepStats()
    history: list[StepStats] = []
    full_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= min(1.0, rows / full_rate_rows)
    for chosen in _minibatches(rows, epochs, minibatch_rows, generator):
        # The weight that a minibatch has in the mean over the batch, so that batching changes no weight.
        scale = rows / (len(chosen) * total_weight)
        loss, stats = policy_loss(model, batch.take(chosen), clip=clip, entropy=entropy, scale=scale)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        history.append(StepStats(rows, float(loss.detach()), *stats, grad_norm=float(norm)))
    for group, full_rate in zip(optimizer.param_groups, full_rates, strict=True):
        group["lr"] = full_rate
    return _mean(history)


def policy_loss(
    model: Qwen2ForCausalLM, batch: Batch, *, clip: Clip, entropy: float, scale: Tensor
) -> tuple[Tensor, tuple[float, float, float]]:
    """The clipped loss of a batch, and its mean entropy, clipped share and mean absolute log ratio."""
    hidden_BTH = model.model(input_ids=batch.input_ids[:, :-1], use_cache=False).last_hidden_state
    is_sampled = batch.mask[:, 1:] > 0
    logprobs_NV = torch.log_softmax(model.lm_head(hidden_BTH[is_sampled]).float(), -1)
    targets_N = batch.input_ids[:, 1:][is_sampled]
    old_N, advantages_N, weights_N = (
        part[:, 1:][is_sampled] for part in (batch.old_logprobs, batch.advantages, batch.weights)
    )
    log_ratio_N = logprobs_NV.gather(1, targets_N[:, None]).squeeze(1) - old_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    gain_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    loss = -((gain_N + entropy * entropy_N) * weights_N).sum() * scale
    with torch.no_grad():
        is_clipped_N = ratio_N * advantages_N > clipped_N * advantages_N
        stats = (float(entropy_N.mean()), float(is_clipped_N.float().mean()), float(log_ratio_N.abs().mean()))
    return loss, stats


def _minibatches(rows: int, epochs: int, size: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(rows, generator=generator).split(size)


def _mean(history: list[StepStats]) -> StepStats:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return StepStats(
        rows=history[0].rows,
        loss=mean([step.loss for step in history]),
        entropy=mean([step.entropy for step in history]),
        clipped=mean([step.clipped for step in history]),
        ratio_error=history[0].ratio_error,
        grad_norm=mean([step.grad_norm for step in history]),
    )
