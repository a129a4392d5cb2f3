"""Check 1: every call that was started is in a sample, masked with a reason, in a dead letter, or still open.

Also that intent and outcome of a call say the same, that deliveries were heard, and that no identity stands for two
contents. That every call of a built group has its one place is in `check_placed.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rollstream.errors import SchemaError
from rollstream.schemas.codec import Codec, encode_body, record_name
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    DeadLetter,
    Delivery,
    Group,
    GroupCredits,
    GroupRewards,
    GroupScores,
    ModelCall,
    Record,
    Rollout,
)
from rollstream.sinks.check_placed import ACCOUNTED, check_placed
from rollstream.sinks.view import Finding, View

IDENTITY = "identity"

COPIES = {"already_done"}
"""Reasons of letters about copies of what was done before: they account for nothing, the first one does."""

_OF_CALLS = frozenset(map(record_name, (CallStarted, ModelCall)))
"""The records that account for the call they name, as a claim check calls them."""

_WORST_FIRST = (Delivery.NONE, Delivery.PARTIAL, Delivery.FULL, Delivery.UNKNOWN)


@dataclass(slots=True)
class Quarantine:
    """What dead letters hold, by what it is."""

    call_ids: set[str] = field(default_factory=set)
    """Calls, also as parts of rollouts."""
    deliveries: set[str] = field(default_factory=set)
    """Calls of which a correction of the delivery was refused."""
    rollouts: set[tuple[str, int]] = field(default_factory=set)
    """Rollout attempts, also as members of groups."""
    bodies: set[str] = field(default_factory=set)
    """Digests of the records, without their framing."""

    def has(self, record: Record) -> bool:
        """Whether this very record was refused."""
        return bool(self.bodies) and digest_bytes(encode_body(record)) in self.bodies


@dataclass(slots=True)
class Accounts:
    """Where the calls of a group are."""

    findings: list[Finding] = field(default_factory=list)
    """What does not hold."""
    places: Counter[str] = field(default_factory=Counter)
    """Calls by place: `in samples`, `masked`, `quarantined`, `open` or `unaccounted`; each call is in the first that fits."""
    still_open: dict[str, str] = field(default_factory=dict)
    """Open calls, with what they wait for."""


def quarantine(letters: Iterable[DeadLetter], codec: Codec) -> Quarantine:
    """What the dead letters account for: what their bytes say or, where these cannot be read, the call that they name.

    A tool result or delivery names its call, too, and does not account for it: neither a late one, nor one whose claim is gone.
    """
    found = Quarantine()
    for letter in letters:
        try:
            record = codec.decode(letter.value)
        except SchemaError:
            check = codec.claim_check(letter.value)
            if letter.call_id is not None and (check is None or check.record in _OF_CALLS):
                found.call_ids.add(letter.call_id)
            continue
        if letter.reason in COPIES:
            continue
        found.bodies.add(digest_bytes(encode_body(record)))
        if isinstance(record, CallDelivery):
            found.deliveries.add(record.call_id)
        elif isinstance(record, ModelCall | CallStarted):
            found.call_ids.add(record.call_id)
        elif isinstance(record, Rollout):
            found.rollouts.add((record.rollout_id, record.attempt))
            found.call_ids.update(call.call_id for call in record.calls)
            found.call_ids.update(record.lost_call_ids)
        elif isinstance(record, Group | GroupScores | GroupRewards | GroupCredits):
            group = record if isinstance(record, Group) else record.group
            found.rollouts.update((member.rollout_id, member.attempt) for member in group.members)
    return found


def check_accounted(view: View, held: Quarantine) -> Accounts:
    """Where each call that was started is, and what does not hold."""
    accounts = Accounts()
    evidence = view.evidence
    for built in evidence.built:
        accounts.findings += check_placed(view, built)
    told = {finding.about for finding in accounts.findings}
    # A sample counts once its group's record names it: until then no trainer gets it.
    samples = [sample for built in evidence.built for sample in view.samples_of(built)]
    used = {segment.call_id for sample in samples for segment in sample.segments}
    masked = {call.call_id: call for built in evidence.built for call in built.masked}
    started = {(start.call_id, start.rollout_id, start.attempt) for start in evidence.starts}
    started |= {(call.call_id, call.rollout_id, call.attempt) for call in evidence.calls}
    for call_id, rollout_id, attempt in sorted(started):
        waits = None
        if call_id in used:
            place = "in samples"
        elif call_id in masked:
            place = "masked"
        elif call_id in held.call_ids or (rollout_id, attempt) in held.rollouts:
            place = "quarantined"
        elif waits := _waits_for(view, call_id, rollout_id, attempt):
            place = "open"
            accounts.still_open[call_id] = waits
        else:
            place = "unaccounted"
            if call_id not in told:
                message = (
                    f"call of rollout {rollout_id!r} attempt {attempt} was started, and it is in no closed rollout or built "
                    f"group of group {view.group_id!r}, and in no dead letter"
                )
                accounts.findings.append(Finding(ACCOUNTED, call_id, message))
        accounts.places[place] += 1
    known = {(call_id, rollout_id) for call_id, rollout_id, _ in started}
    for call_id, call in masked.items():
        if (call_id, call.rollout_id) not in known:
            message = f"is masked in rollout {call.rollout_id!r}, and no intent or outcome of it there is stored"
            accounts.findings.append(Finding(ACCOUNTED, call_id, message))
    accounts.findings += _intents(view, held)
    accounts.findings += _deliveries(view, held)
    return accounts


def check_identity(view: View, held: Quarantine) -> list[Finding]:
    """One content an identity; what join or group refused as a conflict does not count."""
    kinds: tuple[tuple[str, Iterable[tuple[object, object]]], ...] = (
        ("model call", _repeated_calls(view, held)),
        (
            "rollout",
            (
                ((row.rollout_id, row.attempt, row.pipeline_digest), row.digest)
                for row in view.evidence.rollouts
                if (row.rollout_id, row.attempt) not in held.rollouts
            ),
        ),
        ("group", (((g.revision, g.pipeline_digest), g.digest) for g in view.evidence.groups)),
        ("scores", (((s.group_revision, s.pipeline_digest), s.scores_digest) for s in view.evidence.scores)),
        ("rewards", (((r.group_revision, r.pipeline_digest), r.rewards_digest) for r in view.evidence.rewards)),
        ("credits", (((c.group_revision, c.pipeline_digest), c.credits_digest) for c in view.evidence.credits)),
        ("sample", ((s.sample_id, s) for s in view.evidence.samples)),
        ("built group", (((b.group_revision, b.pipeline_digest), b) for b in view.evidence.built)),
    )
    findings = []
    for kind, pairs in kinds:
        contents: dict[object, set[object]] = {}
        for identity, content in pairs:
            contents.setdefault(identity, set()).add(content)
        for identity, several in contents.items():
            if len(several) > 1:
                message = f"{kind} {identity!r} of group {view.group_id!r} is stored with {len(several)} contents, expected 1"
                findings.append(Finding(IDENTITY, str(identity), message))
    return findings


def _repeated_calls(view: View, held: Quarantine) -> Iterator[tuple[object, object]]:
    """Identity and content of calls that are stored more than once: to compare is expensive, and hardly ever needed."""
    by_identity: dict[tuple[str, int], list[ModelCall]] = {}
    for call in view.evidence.calls:
        by_identity.setdefault((call.call_id, call.call_attempt), []).append(call)
    for identity, calls in by_identity.items():
        if len(calls) > 1:
            for call in calls:
                if not held.has(call):
                    yield identity, replace(call, delivered=Delivery.UNKNOWN)


def _waits_for(view: View, call_id: str, rollout_id: str, attempt: int) -> str | None:
    """What a call waits for; None if everything that could hold it is there."""
    closed = [row for row in view.evidence.rollouts if (row.rollout_id, row.attempt) == (rollout_id, attempt)]
    if not closed:
        return "rollout"
    if not any(call_id in {*(ref.call_id for ref in row.calls), *row.lost_call_ids} for row in closed):
        return None
    if not view.evidence.groups:
        return "group"
    return None if view.evidence.built else "samples"


def _intents(view: View, held: Quarantine) -> Iterator[Finding]:
    outcomes: dict[tuple[str, int], list[ModelCall]] = {}
    for outcome in view.evidence.calls:
        outcomes.setdefault((outcome.call_id, outcome.call_attempt), []).append(outcome)
    for start in view.evidence.starts:
        calls = outcomes.get((start.call_id, start.call_attempt), [])
        if len(calls) > 1:
            calls = [call for call in calls if not held.has(call)]
        if not calls:
            continue
        call = calls[-1]
        pairs = {
            "rollout_id": (start.rollout_id, call.rollout_id),
            "attempt": (start.attempt, call.attempt),
            "call_index": (start.call_index, call.call_index),
            "prompt length": (start.prompt_length_tokens, call.prompt.length),
            "prompt digest": (start.prompt_digest, call.prompt.digest),
            "request digest": (start.request_digest, call.request_digest),
        }
        if start.protocol:  # an intent of v1 says no more than the above
            prompt = call.prompt
            pairs |= {
                "protocol": (start.protocol, call.protocol),
                "prompt": (start.prompt_suffix, prompt.suffix),
                "prompt's base": (start.prompt_base_call_id, prompt.base_call_id),
                "shared prompt": (start.prompt_base_len, prompt.base_len),
                "sampling": (start.sampling, call.sampling.as_json()),
            }
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if differing and held.has(call):
            continue
        for name, (intended, came) in differing.items():
            yield Finding(
                ACCOUNTED, call.call_id, f"{name} is {intended!r} in the intent and {came!r} in the outcome"
            )


def _deliveries(view: View, held: Quarantine) -> Iterator[Finding]:
    worst: dict[tuple[str, int], Delivery] = {}
    for correction in view.evidence.deliveries:
        key = (correction.call_id, correction.call_attempt)
        worst[key] = min(worst.get(key, Delivery.UNKNOWN), correction.delivered, key=_WORST_FIRST.index)
    for row in view.evidence.rollouts:
        for ref in row.calls:
            told = worst.get((ref.call_id, ref.call_attempt), Delivery.UNKNOWN)
            written = [c.delivered for c in view.calls.get(ref.call_id, ()) if c.call_attempt == ref.call_attempt]
            expected = {min(told, delivered, key=_WORST_FIRST.index) for delivered in written}
            if written and ref.delivered not in expected and ref.call_id not in held.deliveries:
                yield Finding(
                    ACCOUNTED,
                    ref.call_id,
                    f"delivered is {ref.delivered.value!r} in rollout {row.rollout_id!r}, and call and corrections say "
                    f"{sorted(d.value for d in expected)}",
                )
