"""Which calls of a rollout can be trained on, and which of them share a row.

A row is a run of token ids in which one or more calls sampled something. Under `split` each call has its own. Under `merge` a
call continues a row if and only if

* all ids of the row are the first ids of its prompt, compared id by id;
* it has the same encoding, log-probability semantics, temperature and policy as the row's last call.

Of several such rows it continues the longest. A branch starts a row of its own, since the row it came from has grown
otherwise. Who wrote the prompt against what does not matter: a gateway that lost its memory, or a call that was aborted and
made again, costs no merge.

So the prefix of every sampled token in a row is the one it was sampled under. What lies between two calls' outputs is
context: environment text, what a call that is not trained on sampled, and a sampled tail that was not sent back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollstream.schemas.identity import digest_json
from rollstream.schemas.prompts import Ids, decode_prompts
from rollstream.schemas.records import Delivery, Encoding, LogprobSemantics, MaskedCall, ModelCall, Rollout
from rollstream.schemas.types import unpack_floats, unpack_ids


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call's part of a row: its output starts where its prompt ends."""

    call: ModelCall
    """The call."""
    start: int
    """Position of its first sampled token = length of its prompt."""
    end: int
    """One past its last sampled token."""


@dataclass(slots=True)
class Row:
    """Token ids in which one or more calls sampled something."""

    calls: list[RowCall]
    """Its calls, in order; each one's prompt begins with all that is before."""
    ids: Ids
    """Prompt and output of the last call, shape [T]."""


def lay_out(
    rollout: Rollout, layout: Literal["merge", "split"], masked_calls: Mapping[str, str]
) -> tuple[list[Row], list[MaskedCall]]:
    """The rows of a rollout, and the calls that are in none, with reasons. Each call id is in exactly one of both.

    Args: masked_calls: reasons for calls that are not to be trained on whatever they hold, by call id.

    A call with several attempts is judged by its last; if that one was lost, the call is.
    """
    lost = set(rollout.lost_call_ids)
    by_id = {call.call_id: call for call in rollout.calls}
    reasons = {
        call_id: "lost" if call_id in lost else masked_calls.get(call_id) or defect_of(call)
        for call_id, call in by_id.items()
    }
    trainable = [call for call_id, call in by_id.items() if reasons[call_id] is None]
    prompts, failed = decode_prompts(_with_bases(trainable, by_id)) if trainable else ({}, {})
    rows: list[Row] = []
    for call in trainable:
        if call.call_id in failed:
            reason = failed[call.call_id].reason
            reasons[call.call_id] = "base_missing" if reason == "base_missing" else "prompt_digest"
            continue
        prompt = prompts[call.call_id]
        part = RowCall(call, len(prompt), len(prompt) + len(call.output_ids) // 4)
        ids = np.concatenate([prompt, unpack_ids(call.output_ids)])
        fitting = [row for row in rows if _continues(call, prompt, row)] if layout == "merge" else []
        if fitting:
            row = max(fitting, key=lambda row: len(row.ids))
            row.calls.append(part)
            row.ids = ids
        else:
            rows.append(Row([part], ids))
    masked = [MaskedCall(call_id, rollout.rollout_id, reason) for call_id, reason in reasons.items() if reason]
    masked += [
        MaskedCall(call_id, rollout.rollout_id, "lost") for call_id in rollout.lost_call_ids if call_id not in by_id
    ]
    return rows, masked


def defect_of(call: ModelCall) -> str | None:
    """Why a call cannot be trained on, from the call alone; None if it can.

    The gateway has checked all this and says so in `defects`. It is checked again because other producers may not have.
    """
    if not call.outcome.is_whole:
        return "not_completed"
    if not call.trainable or call.defects:
        return call.defects[0] if call.defects else "not_trainable"
    if call.delivered in (Delivery.NONE, Delivery.PARTIAL):
        return "not_delivered"
    if not call.output_ids:
        return "empty_output"
    if len(call.output_ids) % 4 or len(call.output_ids) != len(call.output_logprobs):
        return "token_count_mismatch"
    logprobs_T = unpack_floats(call.output_logprobs)
    if not np.isfinite(logprobs_T).all():
        return "logprob_missing"
    end = 0
    for span in call.version_spans:
        if span.start != end or span.end <= span.start:
            return "span_gap"
        end = span.end
    if end != len(logprobs_T):
        return "span_gap"
    return "semantics_unknown" if call.logprob_semantics is LogprobSemantics.UNKNOWN else None


def encoding_digest(encoding: Encoding) -> str:
    """Digest of an encoding; calls of different encodings never share a row."""
    return digest_json(
        [encoding.tokenizer_digest, encoding.chat_template_digest, encoding.template_kwargs_digest, encoding.parser]
    )


def _with_bases(trainable: list[ModelCall], by_id: Mapping[str, ModelCall]) -> list[ModelCall]:
    """The calls and all that their prompts were written against, trainable or not, as far as their ids are whole."""
    found: dict[str, ModelCall] = {}
    for first in trainable:
        call: ModelCall | None = first
        while (
            call is not None
            and call.call_id not in found
            and not (len(call.output_ids) | len(call.prompt.suffix)) % 4
        ):
            found[call.call_id] = call
            call = by_id.get(call.prompt.base_call_id or "")
    return list(found.values())


def _continues(call: ModelCall, prompt: Ids, row: Row) -> bool:
    last, length = row.calls[-1].call, len(row.ids)
    return (
        length <= len(prompt)
        and prompt[length - 1] == row.ids[-1]  # nearly always decides alone
        and call.encoding == last.encoding
        and call.logprob_semantics is last.logprob_semantics
        and call.sampling.temperature == last.sampling.temperature
        and call.policy == last.policy
        and bool(np.array_equal(prompt[:length], row.ids))
    )
