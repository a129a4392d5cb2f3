"""Sampling a batch of prompts from a transformers model, exactly: what is reported is what was drawn from.

The distribution is the softmax of the logits divided by the request's temperature (at temperature 0 the likeliest token, with the
log-probability of the undivided logits, as vLLM reports it). A token is drawn by inverting the cumulative distribution at a
number in [0, 1) that belongs to the request alone, so a request with a seed samples the same whatever it is batched with.
Prompts are padded on the left; positions are given, so padding changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from rollstream.producers.engines.base import Ids
from rollstream.schemas.records import SamplingParams

_COMPACT_ROWS = 8
"""A batch is not made smaller than this on the way: copying its cache would cost more than its rows do."""


@dataclass(slots=True, eq=False)
class Job:
    """One request of a batch; filled while it runs."""

    prompt_ids: Ids
    """Shape [P], at least one id."""
    sampling: SamplingParams
    """How to sample."""
    uniforms: npt.NDArray[np.float64]
    """Numbers in [0, 1), shape [max_tokens]: one a token, in order."""
    ids: list[int] = field(default_factory=list)
    """Sampled ids."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probabilities."""
    reason: str = ""
    """`stop`, `length` or `abort` once finished; empty before."""
    is_cancelled: bool = False
    """Set from another thread: stop at the next token."""


def sample_batch(
    model: PreTrainedModel, jobs: Sequence[Job], *, end_ids: frozenset[int], decode: Callable[[list[int]], str]
) -> None:
    """Run jobs to their ends, together.

    Args: end_ids: tokens that end an answer; they are part of it. decode: ids → text, for stop strings.
    """
    with torch.inference_mode():
        _sample(model, list(jobs), end_ids, decode)


def _sample(
    model: PreTrainedModel, jobs: list[Job], end_ids: frozenset[int], decode: Callable[[list[int]], str]
) -> None:
    longest = max(len(job.prompt_ids) for job in jobs)
    steps = max(job.sampling.max_tokens for job in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.long)
    mask = torch.zeros(len(jobs), longest + steps, dtype=torch.long)
    for row, job in enumerate(jobs):
        start = longest - len(job.prompt_ids)
        ids[row, start:] = torch.from_numpy(job.prompt_ids.astype(np.int64))
        mask[row, start:] = 1
    positions = (mask[:, :longest].cumsum(-1) - 1).clamp_(min=0)
    cache = DynamicCache(config=model.config)
    draw = _Draw(jobs, steps)
    alive = list(jobs)
    """The jobs of the rows; a finished one stays in its row until the batch is compacted."""
    for step in range(steps):
        logits = model(
            input_ids=ids,
            attention_mask=mask[:, : longest + step],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        chosen, logprobs = draw(logits, step)
        for job, token, logprob in zip(alive, chosen.tolist(), logprobs.tolist(), strict=True):
            if not job.reason:
                job.ids.append(token)
                job.logprobs.append(logprob)
                job.reason = _reason(job, token, end_ids, decode)
        running = [row for row, job in enumerate(alive) if not job.reason]
        if not running:
            return
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        if _COMPACT_ROWS < len(alive) and len(running) <= len(alive) // 2:
            rows = torch.tensor(running)
            cache.batch_select_indices(rows)
            ids, positions, mask = ids[rows], positions[rows], mask[rows]
            alive = [alive[row] for row in running]
            draw = _Draw(alive, steps)


class _Draw:
    """Draws one token for each row."""

    def __init__(self, jobs: list[Job], steps: int) -> None:
        temperatures = [job.sampling.temperature for job in jobs]
        self._greedy = torch.tensor([t == 0 for t in temperatures])
        self._has_greedy = bool(self._greedy.any())
        self._divisors = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float32)[:, None]
        self._divides = any(t not in (0.0, 1.0) for t in temperatures)
        uniforms = np.zeros((len(jobs), steps))
        for row, job in enumerate(jobs):
            uniforms[row, : len(job.uniforms)] = job.uniforms
        self._uniforms = torch.from_numpy(uniforms)

    def __call__(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probabilities, shape [B] each."""
        logits = logits.float()
        all_logprobs = torch.log_softmax(logits / self._divisors if self._divides else logits, -1)
        cumulative = all_logprobs.exp().double().cumsum_(-1)
        at = self._uniforms[:, step : step + 1] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, at, right=True).clamp_(max=logits.shape[-1] - 1)
        if self._has_greedy:
            chosen = torch.where(self._greedy[:, None], logits.argmax(-1, keepdim=True), chosen)
        return chosen[:, 0], all_logprobs.gather(-1, chosen)[:, 0]


def _reason(job: Job, token: int, end_ids: frozenset[int], decode: Callable[[list[int]], str]) -> str:
    if token in end_ids:
        return "stop"
    if job.sampling.stop:
        text = decode(job.ids)
        if any(stop in text for stop in job.sampling.stop):
            return "stop"
    if len(job.ids) >= job.sampling.max_tokens:
        return "length"
    return "abort" if job.is_cancelled else ""
