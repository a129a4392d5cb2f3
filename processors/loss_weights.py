"""The weight of one trained token's loss, so that splitting, merging and packing samples change no rollout's share.

With N_i the trained tokens of rollout i over all its samples, and R rollouts and N tokens in the trainer's optimizer step:

| aggregation          | weight of a token | here    | the trainer divides by |
|----------------------|-------------------|---------|------------------------|
| token_mean           | 1 / N             | 1       | tokens (N)             |
| token_sum            | 1                 | 1       | nothing                |
| rollout_mean         | 1 / (R N_i)       | 1 / N_i | rollouts (R)           |
| rollout_sum          | 1 / R             | 1       | rollouts (R)           |
| rollout_sum_constant | 1 / (R C)         | 1 / C   | rollouts (R)           |

Only R and N depend on what else is in the step, so only they are left to the trainer. No weight depends on the number of
samples or on which sample a token is in.

Source: TRL `grpo`, `dapo` and `dr_grpo` losses; verl `agg_loss`, modes `token-mean`, `token-sum`, `seq-mean-token-mean`,
`seq-mean-token-sum`, `seq-mean-token-sum-norm`, with rollouts where those have rows.
"""

from __future__ import annotations

from rollstream.schemas.records import Aggregation, Divisor

_DIVISORS = {
    Aggregation.TOKEN_MEAN: Divisor.TOKENS,
    Aggregation.TOKEN_SUM: Divisor.NONE,
    Aggregation.ROLLOUT_MEAN: Divisor.ROLLOUTS,
    Aggregation.ROLLOUT_SUM: Divisor.ROLLOUTS,
    Aggregation.ROLLOUT_SUM_CONSTANT: Divisor.ROLLOUTS,
}


def loss_weight(aggregation: Aggregation, rollout_tokens: int, constant: float | None) -> tuple[float, Divisor]:
    """Weight of each trained token of a rollout, and what the trainer still divides by.

    Args:
        rollout_tokens: N_i, at least 1.
        constant: C, where the aggregation has one.
    """
    divisor = _DIVISORS[aggregation]
    if aggregation is Aggregation.ROLLOUT_MEAN:
        return 1.0 / rollout_tokens, divisor
    if aggregation is Aggregation.ROLLOUT_SUM_CONSTANT:
        if constant is None:
            raise ValueError("aggregation 'rollout_sum_constant' needs a constant")
        return 1.0 / constant, divisor
    return 1.0, divisor
