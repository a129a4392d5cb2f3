"""From an engine's answer to a `ModelCall`: the hard checks, and nothing repaired. Pure.

A failed check adds a code to `defects` and makes the call not trainable; ids, log-probabilities and spans stay what the engine
reported (a log-probability that is none becomes NaN). The codes are in `DEFECTS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollstream.producers.engines.base import Answer, Identity, Ids, LabelSpan
from rollstream.schemas.records import LogprobSemantics, Outcome, SamplingParams, VersionSpan

DEFECTS = {
    "token_count_mismatch": "ids, log-probabilities and the engine's own count are not equally many",
    "logprob_missing": "an id has no log-probability",
    "logprob_sentinel": "a log-probability is infinite or the engine's sign for none (-9999)",
    "logprob_positive": "a log-probability is above 0, so it is none",
    "span_gap": "the version spans leave out output tokens, or overlap",
    "version_label": "a weight label is no policy version",
    "version_unknown": "the engine did not say which weights sampled",
    "version_interval": "the engine did not say which weights sampled, and they changed meanwhile or are not known at all",
    "prompt_mismatch": "the engine was conditioned on other ids than were rendered",
    "vocabulary": "an id is outside the vocabulary",
    "semantics_unknown": "it is not known which distribution the log-probabilities belong to",
    "semantics_raw": "log-probabilities of the model's own distribution, while it was tempered or truncated",
    "truncated_prompt": "the prompt was cut to fit",
    "not_completed": "the call ended neither by itself nor by its token limit",
    "empty_output": "nothing was sampled",
}
"""Reason code → what it says."""

_SENTINEL = -9999.0
"""vLLM writes this number for a log-probability that is missing, NaN or infinite."""
_POSITIVE = 1e-4
"""Rounding may carry the log-probability of a sure token this far above 0 in float32."""
_DEFAULT_LABEL = "default"
"""vLLM's label before any weight update; it is policy version 0."""
_LABEL_DIGITS = 18
"""Longest label that a record can hold as a version, a 64-bit number."""
_LARGEST_PLACE = 2**31
"""No output has so many tokens; an engine that says so is not read."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checks say about an answer."""

    defects: tuple[str, ...]
    """Codes, in the order of `DEFECTS`; empty if the call may be trained on."""
    logprobs: np.ndarray
    """float32, one for each reported; NaN where there is none."""
    spans: tuple[VersionSpan, ...]
    """The spans with a policy version; the others are left out and named by a defect."""


def judge(
    answer: Answer,
    *,
    outcome: Outcome,
    prompt_ids: Ids,
    sampling: SamplingParams,
    identity: Identity,
    versions: tuple[int | None, int | None],
) -> Verdict:
    """Check an answer.

    Args: versions: what the engine was taken to serve when the call began and when it ended. They never stand in for spans: a
        label that is read beside a call says nothing about its tokens. They tell a silent engine from one that changed.
    """
    ids, finish = answer.ids, answer.finish
    logprobs, found = _read_logprobs(answer.logprobs)
    spans, span_defects = read_spans(finish.spans if finish else (), len(ids))
    found |= span_defects
    if not (finish and finish.spans):
        before, after = versions
        found.add("version_unknown" if before is not None and before == after else "version_interval")
    counted = finish.output_tokens if finish else None
    if len(logprobs) != len(ids) or (counted is not None and counted != len(ids)):
        found.add("token_count_mismatch")
    echoed = finish.prompt_ids if finish else None
    if echoed is not None and not np.array_equal(echoed, prompt_ids):
        found.add("truncated_prompt" if _is_cut(echoed, prompt_ids) else "prompt_mismatch")
    if ids and not _are_ids(ids, identity.vocabulary_tokens or 2**32):
        found.add("vocabulary")
    if identity.semantics is LogprobSemantics.UNKNOWN:
        found.add("semantics_unknown")
    is_as_it_is = (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1)
    if identity.semantics is LogprobSemantics.RAW and not is_as_it_is:
        found.add("semantics_raw")
    if not outcome.is_whole:
        found.add("not_completed")
    if not ids:
        found.add("empty_output")
    return Verdict(tuple(code for code in DEFECTS if code in found), logprobs, spans)


def outcome_of(answer: Answer) -> Outcome:
    """How the engine says the call ended."""
    finish = answer.finish
    if finish is None or finish.reason in ("", "error"):
        return Outcome.UPSTREAM_ERROR
    if finish.reason == "abort":
        return Outcome.ABORTED_POLICY_UPDATE if answer.pause_mode else Outcome.ABORTED
    if finish.reason == "length":
        return Outcome.LENGTH
    return Outcome.STOP_STRING if finish.stop_string else Outcome.COMPLETED


def read_spans(spans: Sequence[LabelSpan], output_tokens: int) -> tuple[tuple[VersionSpan, ...], set[str]]:
    """Labels as policy versions, and what is wrong with them; no spans at all are for the caller to judge."""
    found: set[str] = set()
    read = []
    at = 0
    for span in spans:
        if not (_is_place(span.start) and _is_place(span.end)):
            found.add("span_gap")
            continue
        if span.start != at or span.end < span.start:
            found.add("span_gap")
        at = span.end
        label = "0" if span.label == _DEFAULT_LABEL else span.label
        if label.isascii() and label.isdecimal() and len(label) <= _LABEL_DIGITS:
            read.append(VersionSpan(span.start, span.end, int(label)))
        else:
            found.add("version_label")
    if spans and at != output_tokens:
        found.add("span_gap")
    return tuple(read), found


def _is_place(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_PLACE


def _are_ids(values: Sequence[int], vocabulary_tokens: int) -> bool:
    """Whether an engine's ids are ids; JSON may have brought anything."""
    return set(map(type, values)) == {int} and 0 <= min(values) <= max(values) < vocabulary_tokens


def _is_cut(echoed: Ids, prompt_ids: Ids) -> bool:
    """Whether an engine used a part of the prompt, from its start or up to its end."""
    length = len(echoed)
    ends = (prompt_ids[:length], prompt_ids[len(prompt_ids) - length :])
    return 0 < length < len(prompt_ids) and any(np.array_equal(echoed, end) for end in ends)


def _read_logprobs(values: Sequence[float | None]) -> tuple[np.ndarray, set[str]]:
    is_number = {
        kind: issubclass(kind, int | float | np.floating) and kind is not bool for kind in set(map(type, values))
    }
    numbers = [value if is_number[type(value)] else math.nan for value in values]
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and that is found below
        logprobs = np.array(numbers, dtype=np.float32)
    found: set[str] = set()
    if not len(logprobs):
        return logprobs, found
    if np.isnan(logprobs).any():
        found.add("logprob_missing")
    is_sentinel = (logprobs <= _SENTINEL) | np.isinf(logprobs)
    if is_sentinel.any():
        found.add("logprob_sentinel")
        logprobs[is_sentinel] = math.nan
    if (logprobs > _POSITIVE).any():
        found.add("logprob_positive")
    return logprobs, found
