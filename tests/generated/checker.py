"""Recomputes what the records of a rollout must say from what really happened, and names every difference.

Knows the record classes and numpy, and nothing of the code that writes or lays out records. It says in its own words what that
code must do; where both are wrong in the same way, nothing is found.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollstream.schemas.records import CallDelivery, CallStarted, ModelCall, Record
from tests.generated.truth import Attempt

_OUTCOMES = {
    "stop": "completed",
    "stop_string": "stop_string",
    "length": "length",
    "abort": "aborted",
    "update": "aborted_policy_update",
    "error": "upstream_error",
    "died": "upstream_error",
    "left": "client_disconnected",
    "refused": "rejected",
    "overflow": "rejected",
}
"""How it ended → the outcome in the record."""
_CANNOT_CONTINUE = ("refused", "overflow")
"""Sending such a request again changes nothing, so that an equal one is a call of its own."""


@dataclass(frozen=True)
class ExpectedRow:
    """Token ids, and which of them the policy sampled."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    """float32 values where the mask is 1, else 0."""


def check_records(attempts: Sequence[Attempt], records: Iterable[Record]) -> list[str]:
    """Everything that is wrong with the records of a rollout. Args: attempts: in the order in which they ran."""
    return _Check(attempts, records).wrong


def codes_of(attempt: Attempt) -> set[str]:
    """Every defect code that a call must have."""
    codes, count = set(), len(attempt.ids)
    logprobs, codes_of_logprobs = read_logprobs(attempt.logprobs)
    codes |= codes_of_logprobs
    if len(logprobs) != count or attempt.counted not in (None, count):
        codes.add("token_count_mismatch")
    if attempt.spans:
        if any(end < start for start, end, _ in attempt.spans) or _places(attempt.spans) != list(range(count)):
            codes.add("span_gap")
        if any(version_of(label) is None for _, _, label in attempt.spans):
            codes.add("version_label")
    elif None in attempt.versions or attempt.versions[0] != attempt.versions[1]:
        codes.add("version_interval")
    else:
        codes.add("version_unknown")
    if attempt.echoed is not None and attempt.echoed != attempt.prompt:
        part, whole = attempt.echoed, attempt.prompt
        is_cut = bool(part) and len(part) < len(whole) and part in (whole[: len(part)], whole[-len(part) :])
        codes.add("truncated_prompt" if is_cut else "prompt_mismatch")
    ceiling = attempt.vocabulary or 2**32
    if any(not 0 <= token < ceiling for token in attempt.ids):
        codes.add("vocabulary")
    if attempt.semantics == "unknown":
        codes.add("semantics_unknown")
    if attempt.semantics == "raw" and attempt.temperature != 1.0:
        codes.add("semantics_raw")
    if not attempt.is_answered:
        codes.add("not_completed")
    if not count:
        codes.add("empty_output")
    return codes


def read_logprobs(values: Sequence[object]) -> tuple[npt.NDArray[np.float32], set[str]]:
    """What the record must hold, NaN for what is none, and the codes."""
    codes, read = set(), []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, float) or math.isnan(value):
            codes.add("logprob_missing")
            read.append(math.nan)
        elif value <= -9999.0 or abs(value) > 3.4e38:
            codes.add("logprob_sentinel")
            read.append(math.nan)
        else:
            if value > 1e-4:
                codes.add("logprob_positive")
            read.append(value)
    return np.array(read, dtype=np.float32), codes


def version_of(label: str) -> int | None:
    """The policy version that a label names; None if it names none."""
    if label == "default":
        return 0
    return int(label) if 0 < len(label) <= 18 and all("0" <= digit <= "9" for digit in label) else None


def shared_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists have in common from their starts."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


def identities_of(attempts: Sequence[Attempt]) -> list[tuple[int, int]]:
    """Which call each attempt is of, counted by arrival, and which attempt of it: a request continues the oldest equal one that
    is known not to have reached its client, or, if it says that it is a retry, the oldest equal one that is still open.
    """
    found: dict[int, tuple[int, int]] = {}
    continued: set[int] = set()
    for new in sorted(attempts, key=lambda attempt: attempt.arrived):
        earlier = [
            old
            for old in sorted(attempts, key=lambda attempt: attempt.arrived)
            if old.body == new.body and old.arrived < new.arrived and old.arrived not in continued
        ]
        lost = [o for o in earlier if o.ended < new.arrived and o.sent == "no" and o.how not in _CANNOT_CONTINUE]
        still_open = [old for old in earlier if old.ended > new.arrived and new.is_marked]
        for old in (lost or still_open)[:1]:
            continued.add(old.arrived)
            found[new.arrived] = (found[old.arrived][0], found[old.arrived][1] + 1)
        found.setdefault(new.arrived, (len({call for call, _ in found.values()}), 0))
    return [found[attempt.arrived] for attempt in attempts]


def expected_rows(attempts: Sequence[Attempt], *, may_merge: bool) -> list[ExpectedRow]:
    """The rows that may be trained on: one for each call, or, merged, one for each run of calls whose ids go on exactly."""
    last: dict[int, Attempt] = {}
    for (call, _), attempt in zip(identities_of(attempts), attempts, strict=True):
        last[call] = attempt
    rows: list[ExpectedRow] = []
    for call in sorted(last):
        attempt = last[call]
        if codes_of(attempt) or attempt.sent != "whole":
            continue
        fitting = [row for row in rows if may_merge and row.ids == attempt.prompt[: len(row.ids)]]
        base = max(fitting, key=lambda row: len(row.ids), default=ExpectedRow((), (), ()))
        context, count = len(attempt.prompt) - len(base.ids), len(attempt.ids)
        sampled = read_logprobs(attempt.logprobs)[0].tolist()
        row = ExpectedRow(
            ids=attempt.prompt + attempt.ids,
            mask=base.mask + (0,) * context + (1,) * count,
            logprobs=(*base.logprobs, *([0.0] * context), *sampled),
        )
        if fitting:
            rows[rows.index(base)] = row
        else:
            rows.append(row)
    return rows


class _Check:
    """Walks over the log; `wrong` holds what is found."""

    def __init__(self, attempts: Sequence[Attempt], records: Iterable[Record]) -> None:
        self.wrong: list[str] = []
        self._left = [r for r in records if isinstance(r, CallStarted | ModelCall | CallDelivery)]
        self._call_ids: dict[int, str] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        """Call id → prompt and output as its last record says."""
        self._bases: list[tuple[str, tuple[int, ...]]] = []
        """Call ids and (prompt, output) of the answers that went out, oldest first."""
        self._last_index: dict[str, int] = {}
        for number, (attempt, identity) in enumerate(zip(attempts, identities_of(attempts), strict=True)):
            self._at = f"attempt {number} ({attempt.how})"
            self._check_attempt(attempt, identity)
        self._at = "the end"
        self._same("records that nothing explains", 0, len(self._left))
        self._same("number of calls", len(self._call_ids), len(set(self._call_ids.values())))

    def _same(self, what: str, expected: object, actual: object) -> None:
        if expected != actual:
            self.wrong.append(f"{self._at}: {what}: expected {expected!r}, the record says {actual!r}")

    def _check_attempt(self, attempt: Attempt, identity: tuple[int, int]) -> None:
        number, number_of_attempt = identity
        started = self._left.pop(0) if attempt.how != "overflow" and self._left else None
        call = self._left.pop(0) if self._left else None
        if not isinstance(call, ModelCall) or not isinstance(started, CallStarted | None):
            self.wrong.append(f"{self._at}: expected an intent and an outcome, the log has {started!r} and {call!r}")
            return
        call_id = self._call_ids.setdefault(number, call.call_id)
        self._same("call and attempt", (call_id, number_of_attempt), (call.call_id, call.call_attempt))
        self._check_prompt(attempt, call)
        if started is not None:
            self._check_intent(started, call)
        self._check_answer(attempt, call)
        self._check_delivery(attempt, call)
        self._known[call.call_id] = attempt.prompt + tuple(_u32(call.output_ids))
        if attempt.is_answered and attempt.sent != "no":
            self._bases.append((call.call_id, self._known[call.call_id]))

    def _check_prompt(self, attempt: Attempt, call: ModelCall) -> None:
        prompt, base_id = call.prompt, call.prompt.base_call_id
        head = self._known.get(base_id or "", ())[: prompt.base_len]
        self._same("prompt", attempt.prompt, head + tuple(_u32(prompt.suffix)))
        self._same("prompt length", len(attempt.prompt), prompt.length)
        packed = np.array(attempt.prompt, dtype="<u4").tobytes()
        self._same("prompt digest", hashlib.blake2b(packed, digest_size=16).hexdigest(), prompt.digest)
        best, most = None, 0
        for known_id, ids in self._bases:
            if (shared := shared_start(ids, attempt.prompt)) and shared >= most:
                best, most = known_id, shared
        self._same("base and what it shares", (best, most), (base_id, prompt.base_len))

    def _check_intent(self, started: CallStarted, call: ModelCall) -> None:
        prompt = call.prompt
        self._same(
            "intent",
            (call.call_id, call.call_attempt, call.call_index, call.request_digest),
            (started.call_id, started.call_attempt, started.call_index, started.request_digest),
        )
        self._same(
            "prompt of the intent",
            (prompt.length, prompt.digest, prompt.suffix, prompt.base_call_id, prompt.base_len),
            (
                started.prompt_length_tokens, started.prompt_digest, started.prompt_suffix, started.prompt_base_call_id,
                started.prompt_base_len,
            ),
        )  # fmt: skip

    def _check_answer(self, attempt: Attempt, call: ModelCall) -> None:
        ids = [token for token in attempt.ids if 0 <= token < 2**32]
        self._same("sampled ids", ids, _u32(call.output_ids))
        logprobs, _ = read_logprobs(attempt.logprobs)
        written = np.frombuffer(call.output_logprobs, dtype="<f4")
        if not np.array_equal(logprobs, written, equal_nan=True):
            self._same("log-probabilities", logprobs.tolist(), written.tolist())
        spans = [(a, b, version_of(label)) for a, b, label in attempt.spans if version_of(label) is not None]
        self._same("version spans", spans, [(span.start, span.end, span.version) for span in call.version_spans])
        self._same("versions around it", attempt.versions, (call.version_before, call.version_after))
        codes = codes_of(attempt)
        self._same("defects", sorted(codes), sorted(call.defects))
        self._same("trainable", not codes, call.trainable)
        self._same("outcome", _OUTCOMES[attempt.how], call.outcome.value)
        self._same("semantics", attempt.semantics, call.logprob_semantics.value)
        self._same("temperature", attempt.temperature, call.sampling.temperature)
        self._same("mode of the pause", "abort" if attempt.how == "update" else "", call.pause_mode)

    def _check_delivery(self, attempt: Attempt, call: ModelCall) -> None:
        self._same("delivered", "unknown" if attempt.is_answered else "none", call.delivered.value)
        if not attempt.is_answered or attempt.sent == "whole":
            return
        found = self._left.pop(0) if self._left else None
        if not isinstance(found, CallDelivery):
            self.wrong.append(f"{self._at}: expected a correction, the log has {found!r}")
            return
        delivered = {"no": "none", "part": "partial"}[attempt.sent]
        self._same(
            "correction",
            (call.call_id, call.call_attempt, delivered),
            (found.call_id, found.call_attempt, found.delivered.value),
        )


def _u32(packed: bytes) -> list[int]:
    values: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return values


def _places(spans: Iterable[tuple[int, int, str]]) -> list[int]:
    return [place for start, end, _ in spans for place in range(start, end)]
