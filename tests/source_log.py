"""A synthetic source log: what gateways would have written about many rollouts, interleaved as they would be.

Rollout lengths, rewards and token ids are drawn from a seed, so two logs of a seed are equal. Every call's prompt extends the
call before, but for some that start anew (as after a compaction), and some calls are not trainable.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator

import numpy as np

from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    CallStarted,
    EnvironmentEvent,
    EventKind,
    ModelCall,
    Outcome,
    Record,
    RolloutOpened,
    RolloutStatus,
    Terminal,
    VersionSpan,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json, pack_floats
from tests.unit.schemas.calls import a_call

Entry = tuple[str, Record]
"""Topic noun and record."""


def source_log(
    groups: int, size: int, seed: int = 0, open_at_once: int = 12, start_ms: int = 1_700_000_000_000
) -> list[Entry]:
    """Entries of `groups` groups of `size` rollouts, up to `open_at_once` rollouts interleaved.

    Args: start_ms: event time of the first minute. Processors that have read to the end go by the wall clock, so a log of long
        ago has no rollout that is still open.
    """
    rng = random.Random(seed)
    waiting = [
        _rollout(f"g-{g}", f"g-{g}.r-{r}", size, rng.randrange(1 << 30), start_ms)
        for g in range(groups)
        for r in range(size)
    ]
    running: list[Iterator[Entry]] = []
    log: list[Entry] = []
    while waiting or running:
        while waiting and len(running) < open_at_once:
            running.append(waiting.pop(0))
        at = rng.randrange(len(running))
        entry = next(running[at], None)
        if entry is None:
            running.pop(at)
            continue
        log.append(entry)
    return log


def _rollout(group_id: str, rollout_id: str, size: int, seed: int, start_ms: int) -> Iterator[Entry]:
    rng = random.Random(seed)
    clock = itertools.count(start_ms + rng.randrange(60_000), 7)
    yield "calls", RolloutOpened(rollout_id, 0, group_id, size, "task", next(clock), Json('{"question": 1}'))
    known: dict[str, np.ndarray] = {}
    conversation = [rng.randrange(50) for _ in range(8)]
    calls = rng.randint(1, 6)
    for index in range(calls):
        if rng.random() < 0.1:
            conversation = [rng.randrange(50) for _ in range(5)]
        output = [rng.randrange(50) for _ in range(rng.randint(1, 8))]
        prompt = encode_prompt(np.array(conversation, dtype=np.uint32), known)
        call = a_call(
            f"{rollout_id}.c-{index}",
            prompt=prompt,
            output=output,
            rollout_id=rollout_id,
            group_id=group_id,
            call_index=index,
        )
        call = dataclasses.replace(_varied(call, rng), started_at_ms=next(clock), finished_at_ms=next(clock))
        yield (
            "calls",
            CallStarted(
                call.call_id,
                rollout_id,
                0,
                group_id,
                index,
                prompt.length,
                prompt.digest,
                call.request_digest,
                call.started_at_ms,
            ),
        )
        yield "calls", call
        known[call.call_id] = np.array(conversation + output, dtype=np.uint32)
        conversation = conversation + output + [rng.randrange(50) for _ in range(4)]
        event = EnvironmentEvent(
            f"e-{index}", rollout_id, 0, group_id, EventKind.TOOL_RESULT, Json(json.dumps({"n": index})), next(clock)
        )
        yield "environment", event
    reward = rng.random() < 0.4
    status = RolloutStatus.SUCCEEDED if reward else RolloutStatus.FAILED
    terminal = Terminal(
        rollout_id,
        0,
        group_id,
        size,
        "task",
        status,
        next(clock),
        Json(json.dumps({"reward": int(reward)})),
        calls,
        calls,
    )
    for noun in TERMINAL_TOPICS:
        yield noun, terminal


def _varied(call: ModelCall, rng: random.Random) -> ModelCall:
    tokens = len(call.output_ids) // 4
    logprobs = pack_floats([-rng.random() for _ in range(tokens)])
    cut = rng.randint(0, tokens)
    version = rng.randrange(3)
    spans = [VersionSpan(0, cut, version), VersionSpan(cut, tokens, version + 1)]
    call = dataclasses.replace(
        call, output_logprobs=logprobs, version_spans=tuple(s for s in spans if s.end > s.start)
    )
    if rng.random() < 0.05:
        return dataclasses.replace(call, outcome=Outcome.UPSTREAM_ERROR, trainable=False, defects=("not_completed",))
    return call
