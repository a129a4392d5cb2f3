"""A model call with plain values, to vary in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    Delivery,
    Encoding,
    LogprobSemantics,
    ModelCall,
    Outcome,
    PromptDelta,
    SamplingParams,
    VersionSpan,
)
from rollstream.schemas.types import pack_floats, pack_ids


def a_call(
    call_id: str,
    *,
    prompt: PromptDelta | Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (4, 5),
    rollout_id: str = "r-1",
    group_id: str = "g-1",
    call_index: int = 0,
) -> ModelCall:
    """A completed, trainable call of policy version 0."""
    if not isinstance(prompt, PromptDelta):
        prompt = encode_prompt(np.array(prompt, dtype=np.uint32), {})
    return ModelCall(
        call_id=call_id,
        rollout_id=rollout_id,
        attempt=0,
        group_id=group_id,
        call_index=call_index,
        protocol="openai-chat",
        adapter_version="1",
        model_requested="policy",
        model_served="policy",
        engine="local",
        engine_version="1",
        encoding=Encoding("t", "c", "k", "hermes"),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16),
        logprob_semantics=LogprobSemantics.PROCESSED,
        prompt=prompt,
        output_ids=pack_ids(output),
        output_logprobs=pack_floats([-0.5] * len(output)),
        version_spans=(VersionSpan(0, len(output), 0),) if output else (),
        policy="default",
        finish_reason="stop",
        outcome=Outcome.COMPLETED,
        delivered=Delivery.UNKNOWN,
        trainable=True,
        defects=(),
        request_digest="d",
        started_at_ms=1_000 + call_index,
        finished_at_ms=1_010 + call_index,
    )
