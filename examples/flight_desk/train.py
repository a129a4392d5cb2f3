"""The trainer process: reads whole groups of samples, takes policy-gradient steps, hands the weights to the engine.

It knows rollstream only through `SampleReader` and the gateway's `POST /policies`. The loss uses the recorded rollout
log-probabilities; nothing is computed again from text.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM

from rollstream.producers import RolloutClient
from rollstream.settings import load_settings
from rollstream.trainers import SampleGroup, SampleReader
from rollstream.trainers.collate import collate

from . import grpo, recipe

_GROUPS_WAIT_S = 20.0
"""A step is taken with fewer groups after this long: what was skipped as stale is not played again."""


@click.command()
@click.option("--gateway", required=True, help="The gateway's address.")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Folder of the model as it starts.")
@click.option("--weights", type=click.Path(path_type=Path), required=True, help="Folder for a folder a version.")
@click.option("--steps", type=int, required=True, help="Optimizer steps.")
@click.option("--seed", type=int, required=True, help="Decides the order of rows.")
@click.option("--shuffle-rewards", is_flag=True, help="Control: give every rollout the advantage of another one.")
@click.option("--log", type=click.Path(path_type=Path), required=True, help="File for a JSON line a step.")
def main(gateway: str, model: Path, weights: Path, steps: int, seed: int, shuffle_rewards: bool, log: Path) -> None:
    """Train the policy from the sample topic."""
    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model)
    optimizer = grpo.make_optimizer(policy, recipe.LEARNING_RATE)
    order = torch.Generator().manual_seed(seed)
    settings = load_settings()
    with (
        SampleReader(
            settings.kafka, trainer="flight-desk", policy="default", max_staleness=recipe.MAX_STALENESS
        ) as reader,
        RolloutClient(gateway) as rollouts,
        log.open("w", encoding="utf-8") as lines,
    ):
        for step in range(steps):
            groups = reader.next_groups(recipe.GROUPS_PER_STEP, _GROUPS_WAIT_S)
            began_s = time.monotonic()
            stats = _train(policy, optimizer, groups, order, shuffle_rewards)
            folder = weights / str(step + 1)
            policy.save_pretrained(folder)
            rollouts.publish_policy(step + 1, str(folder), parent_version=step, step=step)
            reader.record_step(
                step=step, version_before=step, version_after=step + 1, groups=groups, checkpoint=str(folder)
            )
            line = {
                "step": step,
                "version": step + 1,
                "groups": len(groups),
                "trained_groups": sum(group.built.has_spread for group in groups),
                "samples": sum(len(group.samples) for group in groups),
                "mean_reward": _mean(
                    [group.built.mean_reward for group in groups if group.built.mean_reward is not None]
                ),
                "staleness": _mean([float(step - s.version_min) for group in groups for s in group.samples]),
                "seconds": round(time.monotonic() - began_s, 3),
                **asdict(stats),
            }
            lines.write(json.dumps(line) + "\n")
            lines.flush()


def _train(
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: list[SampleGroup],
    order: torch.Generator,
    shuffle_rewards: bool,
) -> grpo.StepStats:
    samples = [sample for group in groups if group.built.has_spread for sample in group.samples]
    if not samples:
        return grpo.StepStats()
    tensors = collate(samples)
    advantages = tensors["advantages"]
    if shuffle_rewards:
        advantages = _shuffled(advantages, tensors["mask"], [sample.rollout_id for sample in samples], order)
    batch = grpo.Batch(
        input_ids=tensors["input_ids"],
        mask=tensors["mask"],
        old_logprobs=tensors["logprobs"],
        advantages=advantages,
        weights=tensors["loss_weight"],
    )
    return grpo.train_step(
        policy,  # type: ignore[arg-type]
        optimizer,
        batch,
        epochs=recipe.EPOCHS,
        minibatch_rows=recipe.MINIBATCH_ROWS,
        clip=grpo.Clip(recipe.CLIP_LOW, recipe.CLIP_HIGH),
        entropy=recipe.ENTROPY,
        full_rate_rows=recipe.FULL_RATE_ROWS,
        generator=order,
    )


def _shuffled(
    advantages: torch.Tensor, mask: torch.Tensor, rollouts: list[str], order: torch.Generator
) -> torch.Tensor:
    """Each rollout's advantage given to another rollout: the same numbers, no information. Shapes [B, T]."""
    names = sorted(set(rollouts))
    row_value = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    value = {name: row_value[rollouts.index(name)] for name in names}
    other = [names[i] for i in torch.randperm(len(names), generator=order)]
    given = {name: value[source] for name, source in zip(names, other, strict=True)}
    return torch.stack([given[name] for name in rollouts])[:, None] * mask


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


if __name__ == "__main__":
    main()
