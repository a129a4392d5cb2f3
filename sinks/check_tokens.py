"""Check 2: every sampled token of every sample is the call's own, under the call's own prefix, exactly once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rollstream.schemas.identity import digest_ids, digest_json
from rollstream.schemas.records import Delivery, GroupBuilt, ModelCall, Sample, SampleSegment, VersionSpan
from rollstream.schemas.types import pack_ids, unpack_floats, unpack_ids, unpack_mask
from rollstream.sinks.view import Finding, View

TOKENS = "token_traceable"


def check_tokens(view: View, built: GroupBuilt) -> Iterator[Finding]:
    """Findings over the samples of one built group."""
    covered: dict[tuple[str, int], str] = {}
    for sample in view.samples_of(built):
        for message in _shape(sample):
            yield Finding(TOKENS, sample.sample_id, message)
        row = view.rollouts.get(sample.rollout_digest)
        if row is None:
            continue  # the lineage check says so
        ids, logprobs = unpack_ids(sample.ids), unpack_floats(sample.logprobs)
        for segment in sample.segments:
            call = view.call_of_segment(row, segment.call_id, pack_ids(ids[segment.start : segment.end]))
            if call is None:
                yield Finding(
                    TOKENS, sample.sample_id, f"call {segment.call_id!r} is not stored in rollout {row.rollout_id!r}"
                )
                continue
            for message in _segment(view, sample, segment, call, ids, logprobs):
                yield Finding(TOKENS, sample.sample_id, f"call {call.call_id!r}: {message}")
            other = covered.setdefault((call.call_id, call.call_attempt), sample.sample_id)
            if other != sample.sample_id:
                yield Finding(TOKENS, call.call_id, f"its tokens are in samples {other!r} and {sample.sample_id!r}")
    yield from _all_covered(view, built, set(covered))


def _shape(sample: Sample) -> Iterator[str]:
    mask = unpack_mask(sample.mask)
    lengths = {
        "ids": len(unpack_ids(sample.ids)),
        "mask": len(mask),
        "logprobs": len(unpack_floats(sample.logprobs)),
        "advantages": len(unpack_floats(sample.advantages)),
    }
    if len(set(lengths.values())) != 1:
        yield f"its arrays have lengths {lengths}, expected equal ones"
        return
    expected = np.zeros(len(mask), dtype=np.uint8)
    ends = 0
    for segment in sample.segments:
        if not ends <= segment.start < segment.end <= len(mask):
            yield f"segment [{segment.start}, {segment.end}) does not follow {ends} within {len(mask)} tokens"
            return
        ends = segment.end
        expected[segment.start : segment.end] = 1
    if not np.array_equal(mask, expected):
        yield f"mask marks {int(mask.sum())} tokens, expected those {int(expected.sum())} of its segments"
    sampled = expected == 1
    if not np.isfinite(unpack_floats(sample.logprobs)[sampled]).all():
        yield "a sampled token has no log-probability"
    if not np.isnan(unpack_floats(sample.logprobs)[~sampled]).all():
        yield "a token that was not sampled has a log-probability"
    if unpack_floats(sample.advantages)[~sampled].any():
        yield "a token that was not sampled has an advantage"
    if any(after.start < before.end for before, after in itertools.pairwise(sample.versions)):
        yield "its version spans overlap"
    versions = _per_token(sample.versions, len(mask))
    if (versions[sampled] < 0).any():
        yield "a sampled token has no policy version"
    elif sampled.any():
        found = (int(versions[sampled].min()), int(versions[sampled].max()))
        if found != (sample.version_min, sample.version_max):
            yield f"versions are {found[0]} to {found[1]}, and it says {sample.version_min} to {sample.version_max}"


def _segment(
    view: View,
    sample: Sample,
    segment: SampleSegment,
    call: ModelCall,
    ids: npt.NDArray[np.uint32],
    logprobs: npt.NDArray[np.float32],
) -> Iterator[str]:
    start, end = segment.start, segment.end
    if not call.trainable:
        yield f"is not trainable: {', '.join(call.defects) or 'no defect named'}"
    if call.delivered in (Delivery.NONE, Delivery.PARTIAL):
        yield f"did not reach the client whole: delivered is {call.delivered.value!r}"
    if pack_ids(ids[start:end]) != call.output_ids:
        yield f"tokens [{start}, {end}) are not the ids it sampled"
    if logprobs[start:end].tobytes() != call.output_logprobs:
        yield f"log-probabilities [{start}, {end}) are not those it was sampled with"
    prefix = digest_ids(pack_ids(ids[:start]))
    whole, failed = view.prompts
    prompt = whole.get(call.call_id)
    if prompt is None:
        yield f"its prompt cannot be decoded: {failed.get(call.call_id, 'no such call')}"
    elif len(prompt) != start or digest_ids(pack_ids(prompt)) != prefix:
        yield f"the {start} tokens before it are not its prompt of {len(prompt)}"
    if not prefix == segment.prompt_digest == call.prompt.digest:
        yield f"prompt digest is {prefix} by the tokens, {segment.prompt_digest} by the segment, {call.prompt.digest} by the call"
    theirs = _per_token(call.version_spans, end - start)
    ours = _per_token(sample.versions, len(ids))[start:end]
    if not np.array_equal(ours, theirs):
        yield f"policy versions of tokens [{start}, {end}) are not those of its spans"
    pairs = {
        "policy": (sample.policy, call.policy),
        "temperature": (sample.temperature, call.sampling.temperature),
        "logprob_semantics": (sample.logprob_semantics, call.logprob_semantics),
        "rollout_id": (sample.rollout_id, call.rollout_id),
        "rollout_attempt": (sample.rollout_attempt, call.attempt),
        "encoding_digest": (sample.encoding_digest, digest_json(list(dataclasses.astuple(call.encoding)))),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            yield f"{name} is {found!r} in the sample and {expected!r} in the call"


def _all_covered(view: View, built: GroupBuilt, covered: set[tuple[str, int]]) -> Iterator[Finding]:
    """Every trainable call of the group's rollouts that is not masked is in a sample."""
    decided = {call.call_id for call in built.masked} | {call_id for call_id, _ in covered}
    rows = view.credits.get(built.credits_digest)
    group = view.groups.get(rows[0].group_digest) if rows else None
    for member in group.members if group else ():
        row = view.rollouts.get(member.rollout_digest)
        for call in view.calls_of(row) if row else ():
            if call.trainable and call.call_id not in decided:
                yield Finding(
                    TOKENS, call.call_id, f"is trainable, not masked, and in no sample of group {view.group_id!r}"
                )


def _per_token(spans: tuple[VersionSpan, ...], length: int) -> npt.NDArray[np.int64]:
    """Version of each token, shape [T]; -1 where no span covers it."""
    versions = np.full(max(length, 0), -1, dtype=np.int64)
    for span in spans:
        versions[max(span.start, 0) : max(span.end, 0)] = span.version
    return versions
