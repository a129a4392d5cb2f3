"""Prompts as deltas: what a prompt shares with an earlier call of its rollout is written once.

Harnesses send the whole conversation with every call, so logging prompts in full grows with the square of the turns. The
shared part is found by comparing ids, never text, and every decoder checks the digest of the whole prompt: a delta can
be refused, it cannot be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from rollstream.errors import SchemaError
from rollstream.schemas.identity import digest_ids
from rollstream.schemas.records.calls import ModelCall, PromptDelta
from rollstream.schemas.types import pack_ids, unpack_ids

Ids = npt.NDArray[np.uint32]


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading ids that a and b, shapes [A] and [B], share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def encode_prompt(ids: Ids, bases: Mapping[str, Ids]) -> PromptDelta:
    """Write a prompt against the base that shares most with it.

    Args:
        ids: the whole prompt, shape [T].
        bases: (prompt ‖ output) of earlier calls of the same rollout by call id, oldest first. Of equals the latest wins.
    """
    best, best_len = None, 0
    for call_id, base in bases.items():
        shared = common_prefix(ids, base)
        if shared and shared >= best_len:
            best, best_len = call_id, shared
    packed = pack_ids(ids)
    return PromptDelta(
        suffix=pack_ids(ids[best_len:]),
        length=len(ids),
        digest=digest_ids(packed),
        base_call_id=best,
        base_len=best_len,
    )


def decode_prompt(delta: PromptDelta, base: Ids | None) -> Ids:
    """The whole prompt, shape [T].

    Args:
        base: (prompt ‖ output) of the base call; None if the delta has no base.

    Raises: SchemaError: reason `base_missing`, `base_too_short` or `prompt_digest`.
    """
    suffix = unpack_ids(delta.suffix)
    if delta.base_call_id is None:
        ids = suffix
    elif base is None:
        raise SchemaError(
            f"cannot decode prompt: its base call_id={delta.base_call_id!r} is not there; read the rollout's earlier "
            "calls first",
            reason="base_missing",
        )
    elif len(base) < delta.base_len:
        raise SchemaError(
            f"cannot decode prompt: base call_id={delta.base_call_id!r} has {len(base)} ids, expected at least "
            f"{delta.base_len}",
            reason="base_too_short",
        )
    else:
        ids = np.concatenate([base[: delta.base_len], suffix])
    found = digest_ids(pack_ids(ids))
    if len(ids) != delta.length or found != delta.digest:
        raise SchemaError(
            f"cannot decode prompt: got {len(ids)} ids with digest {found}, expected {delta.length} with "
            f"{delta.digest}; the delta or its base was changed",
            reason="prompt_digest",
        )
    return ids


def decode_prompts(calls: Iterable[ModelCall]) -> tuple[dict[str, Ids], dict[str, SchemaError]]:
    """Whole prompts of a rollout's calls, whatever their order.

    Returns: prompts by call id, and for the calls whose prompt cannot be known, why. A call may have several attempts; the
    last one given counts.
    """
    by_id = {call.call_id: call for call in calls}
    prompts: dict[str, Ids] = {}
    failed: dict[str, SchemaError] = {}
    for first in by_id:
        chain: list[str] = []
        at: str | None = first
        while at is not None and at in by_id and at not in prompts and at not in failed and at not in chain:
            chain.append(at)
            at = by_id[at].prompt.base_call_id
        for call_id in reversed(chain):
            delta = by_id[call_id].prompt
            base = delta.base_call_id
            whole = (
                np.concatenate([prompts[base], unpack_ids(by_id[base].output_ids)])
                if base is not None and base in prompts
                else None
            )
            try:
                prompts[call_id] = decode_prompt(delta, whole)
            except SchemaError as error:
                failed[call_id] = error
    return prompts, failed
