"""One group's stored rows against the ledger: what is lost, doubled or wrong. Pure.

What was acknowledged to a client must be stored and have its place. What was not may be stored, once, and right. Where time or
a fault decides what becomes of a rollout (nobody finished it, its finish was never acknowledged, it took longer than its
deadline), only what holds in any case is asked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from chaos.check_built import BuiltCheck
from chaos.ledger import AttemptTruth, GroupTruth, Line
from chaos.problem import Problem, Rules
from chaos.truth import Sampled, from_ids, sample, text_of
from rollstream.errors import SchemaError
from rollstream.schemas.codec import Codec
from rollstream.schemas.prompts import Ids, decode_prompts
from rollstream.schemas.records import (
    ClosedBy,
    DeadLetter,
    EnvironmentEvent,
    Group,
    GroupClose,
    ModelCall,
    Rollout,
    RolloutStatus,
)
from rollstream.schemas.types import unpack_floats, unpack_ids
from rollstream.sinks.check_accounted import quarantine
from rollstream.sinks.rows import RolloutRow
from rollstream.sinks.stored import Evidence

_MARGIN_MS = 1_000


@dataclass(frozen=True, slots=True)
class Held:
    """What the dead letters hold."""

    call_ids: frozenset[str] = frozenset()
    """Calls, also as parts of rollouts."""
    rollouts: frozenset[tuple[str, int]] = frozenset()
    """Rollout attempts."""
    events: frozenset[tuple[str, int, str]] = frozenset()
    """Environment events: rollout, attempt and event id, also as parts of rollouts."""


def held_by(letters: Iterable[DeadLetter], codec: Codec) -> Held:
    """What is in the dead letters; those that cannot be read hold the call that they name."""
    events: set[tuple[str, int, str]] = set()
    found = quarantine(_noting_events(letters, codec, events), codec)
    return Held(frozenset(found.call_ids), frozenset(found.rollouts), frozenset(events))


def _noting_events(
    letters: Iterable[DeadLetter], codec: Codec, events: set[tuple[str, int, str]]
) -> Iterator[DeadLetter]:
    """The same dead letters, one at a time; which events they hold is added to `events`."""
    for letter in letters:
        try:
            record = codec.decode(letter.value)
        except SchemaError:
            record = None
        several = record.events if isinstance(record, Rollout) else (record,)
        events.update((e.rollout_id, e.attempt, e.event_id) for e in several if isinstance(e, EnvironmentEvent))
        yield letter


def check_group(truth: GroupTruth, evidence: Evidence, held: Held, rules: Rules) -> Iterator[Problem]:
    """Everything that does not hold in one group."""
    check = _Check(truth, evidence, held, rules)
    yield from check.identities()
    yield from check.calls()
    yield from check.events_and_finishes()
    yield from check.rollouts()
    yield from check.groups()
    yield from check.built()


def certainties(truth: GroupTruth, rules: Rules) -> tuple[int, bool]:
    """How many attempts must have become rollouts that their finish closed, and whether the group must be full.

    A run in which this is next to nothing proves next to nothing: its deadlines are too short for what it suffered.
    """
    check = _Check(truth, Evidence(truth.group_id), Held(), rules)
    return sum(check.is_certain.values()), check.is_full


def unknown_group(group_id: str) -> Problem:
    """A stored group that nobody played."""
    return Problem("wrong", group_id, "is stored, and no client opened a rollout of it")


class _Check:
    def __init__(self, truth: GroupTruth, evidence: Evidence, held: Held, rules: Rules) -> None:
        self._truth = truth
        self._evidence = evidence
        self._held = held
        self._rules = rules
        self._rows: dict[tuple[str, int], list[RolloutRow]] = defaultdict(list)
        for row in evidence.rollouts:
            self._rows[row.rollout_id, row.attempt].append(row)
        self._calls: dict[tuple[str, int], list[ModelCall]] = defaultdict(list)
        for call in sorted(evidence.calls, key=lambda c: (c.call_index, c.call_id, c.call_attempt)):
            self._calls[call.rollout_id, call.attempt].append(call)
        self._spoken: dict[str, list[tuple[Ids, Sampled]]] = defaultdict(list)
        """Prompt and what the engine said to it, by call id; one an attempt."""
        self.is_certain = {key: self._certain(attempt) for key, attempt in truth.attempts.items()}
        self.is_full = self._group_is_certain()

    # ---------------------------------------------------------------- what must be

    def _certain(self, attempt: AttemptTruth) -> bool:
        """Whether the attempt must have become a rollout that its finish closed."""
        done = attempt.finished
        if done is None or not attempt.is_opened or self._truth.is_superseded(attempt):
            return False
        return bool(done["t1"] < attempt.opened_ms + self._rules.join_deadline_ms - _MARGIN_MS)

    def _group_is_certain(self) -> bool:
        """Whether the group must have closed as full, with the last attempt of each rollout."""
        last = [self._truth.last_attempt(rollout_id) for rollout_id in self._truth.members]
        ends = []
        for attempt in last:
            done = attempt.finished if attempt else None
            if attempt is None or done is None or not self.is_certain[attempt.rollout_id, attempt.number]:
                return False
            lower = self._truth.lower_attempts(attempt)
            first_ms = min(a.opened_ms for a in [attempt, *lower])
            if any(a.finishes for a in lower) or done["t1"] >= first_ms + self._rules.join_deadline_ms - _MARGIN_MS:
                return False
            ends.append((attempt.finishes[0]["t0"], done["t1"]))
        latest, earliest = max(end for _, end in ends), min(begin for begin, _ in ends)
        return bool(latest < earliest + self._rules.group_deadline_ms - _MARGIN_MS)

    # ---------------------------------------------------------------- checks

    def identities(self) -> Iterator[Problem]:
        """One content an identity, and all of one group."""
        contents: dict[tuple[object, ...], set[int]] = defaultdict(set)
        for call in self._evidence.calls:
            contents["call", call.call_id, call.call_attempt].add(hash(call))
        for row in self._evidence.rollouts:
            if (row.rollout_id, row.attempt) not in self._held.rollouts:
                contents["rollout", row.rollout_id, row.attempt, row.pipeline_digest].add(hash(row))
        for group in self._evidence.groups:
            contents["group", group.group_id, group.revision, group.pipeline_digest].add(hash(group))
        for one in self._evidence.samples:
            contents["sample", one.sample_id].add(hash(one))
        for built in self._evidence.built:
            contents["built group", built.group_id, built.group_revision, built.pipeline_digest].add(hash(built))
        for identity, several in contents.items():
            if len(several) > 1:
                yield Problem("doubled", str(identity[1]), f"{identity!r} has {len(several)} contents, expected 1")

    def calls(self) -> Iterator[Problem]:
        """Each acknowledged call is stored as the client saw it; each stored call was asked for, and the engine said it."""
        for key, calls in self._calls.items():
            attempt = self._truth.attempts.get(key)
            if attempt is None:
                yield Problem("wrong", calls[0].call_id, f"is of rollout attempt {key}, which nobody opened")
                continue
            yield from self._asked_for(attempt, calls)
            yield from self._said(calls)
        for key, attempt in self._truth.attempts.items():
            by_id: dict[str, list[ModelCall]] = defaultdict(list)
            for call in self._calls.get(key, ()):
                by_id[call.call_id].append(call)
            started = {start.call_id for start in self._evidence.starts if (start.rollout_id, start.attempt) == key}
            told = [line for line in attempt.calls if line["ok"]]
            for call_id, times in Counter(line["id"] for line in told).items():
                if times > 1:
                    yield Problem("doubled", call_id, f"was given to the client as the answer to {times} requests")
            for line in told:
                if line["id"] not in by_id:
                    yield Problem("lost", line["id"], f"was acknowledged to {key}, and no outcome of it is stored")
                elif line["id"] not in started:
                    yield Problem("lost", line["id"], f"was acknowledged to {key}, and its intent is not stored")
                else:
                    yield from _as_told(line, by_id[line["id"]])

    def _asked_for(self, attempt: AttemptTruth, calls: Sequence[ModelCall]) -> Iterator[Problem]:
        """At most one stored call a request."""
        sent = Counter(line["prompt"] for line in attempt.calls)
        stored = Counter(digest for digest, _, _ in {(c.prompt.digest, c.call_id, c.call_attempt) for c in calls})
        for digest, times in stored.items():
            about = next(call.call_id for call in calls if call.prompt.digest == digest)
            if digest not in sent:
                yield Problem("wrong", about, f"has prompt {digest}, which {attempt.rollout_id!r} never sent")
            elif times > sent[digest]:
                message = f"{times} calls with prompt {digest} are stored, the client sent {sent[digest]}"
                yield Problem("doubled", about, message)

    def _said(self, calls: Sequence[ModelCall]) -> Iterator[Problem]:
        """Ids, log-probabilities and versions are the engine's."""
        prompts, failed = decode_prompts(calls)
        by_digest = {call.prompt.digest: prompts[call.call_id] for call in calls if call.call_id in prompts}
        for call in calls:
            prompt = by_digest.get(call.prompt.digest)
            if prompt is None:
                error: SchemaError | None = failed.get(call.call_id)
                yield Problem("lost", call.call_id, f"its prompt cannot be read: {error}")
                continue
            try:
                expected = _sampled(call, prompt)
                self._spoken[call.call_id].append((prompt, expected))
                tokens = from_ids(unpack_ids(call.output_ids))
            except ValueError as error:
                yield Problem("wrong", call.call_id, f"holds what is no token of the engine: {error}")
                continue
            yield from _differences(call, tokens, expected)

    def events_and_finishes(self) -> Iterator[Problem]:
        """Each acknowledged event and finish is stored, and nothing that was not sent."""
        sent = {
            (*key, line["e"]): line["content"]
            for key, attempt in self._truth.attempts.items()
            for line in attempt.events
        }
        stored = {(e.rollout_id, e.attempt, e.event_id): e for e in self._evidence.events}
        for name, event in stored.items():
            if name not in sent:
                yield Problem("wrong", event.event_id, f"event of {name[:2]} is stored, and nobody sent it")
            elif orjson.loads(event.content) != sent[name]:
                yield Problem("wrong", event.event_id, f"holds {event.content}, the client sent {sent[name]}")
        for key, attempt in self._truth.attempts.items():
            for event_id in {line["e"] for line in attempt.events if line["ok"]}:
                if (*key, event_id) not in stored:
                    yield Problem("lost", event_id, f"event was acknowledged to {key}, and is not stored")
            ends = [t for t in self._evidence.terminals if (t.rollout_id, t.attempt) == key]
            if attempt.finished is not None and not ends:
                yield Problem("lost", attempt.rollout_id, f"finish of {key} was acknowledged, and is not stored")
            if attempt.is_opened and key not in {(o.rollout_id, o.attempt) for o in self._evidence.openings}:
                yield Problem("lost", attempt.rollout_id, f"opening of {key} was acknowledged, and is not stored")
            for end in ends:
                if (end.status.value, orjson.loads(end.outcome)) not in [
                    _finish_of(line) for line in attempt.finishes
                ]:
                    message = f"{key} finished as {end.status.value} {end.outcome}, the client sent something else"
                    yield Problem("wrong", attempt.rollout_id, message)

    def rollouts(self) -> Iterator[Problem]:
        """Each opened attempt became one rollout, that holds what was acknowledged before its finish."""
        for key in self._rows.keys() - self._truth.attempts.keys():
            yield Problem("wrong", key[0], f"rollout {key} is stored, and nobody opened it")
        for key, attempt in self._truth.attempts.items():
            rows = self._rows.get(key, [])
            if not rows:
                if attempt.is_opened and key not in self._held.rollouts:
                    yield Problem("lost", key[0], f"{key} was opened, and became neither a rollout nor a dead letter")
                continue
            yield from self._rollout(attempt, rows[0])

    def _rollout(self, attempt: AttemptTruth, row: RolloutRow) -> Iterator[Problem]:
        key, is_certain = (row.rollout_id, row.attempt), self.is_certain[row.rollout_id, row.attempt]
        holds = {ref.call_id for ref in row.calls}
        for line in attempt.calls:
            if not line["ok"]:
                continue
            if line["late"]:
                if line["id"] in holds:
                    yield Problem(
                        "wrong", line["id"], f"was sent after the finish of {key} was acknowledged, and is in it"
                    )
                elif line["id"] not in self._held.call_ids:
                    yield Problem("lost", line["id"], f"came after the finish of {key}, and is no dead letter")
            elif line["id"] not in holds and (is_certain or line["id"] not in self._held.call_ids):
                yield Problem("lost", line["id"], f"was acknowledged before the finish of {key}, and is not in it")
        if is_certain:
            for event_id in {line["e"] for line in attempt.events if line["ok"]} - set(row.event_ids):
                yield Problem(
                    "lost", event_id, f"event was acknowledged before the finish of {key}, and is not in it"
                )
            if row.closed_by is not ClosedBy.BARRIER:
                yield Problem(
                    "wrong", row.rollout_id, f"{key} was closed by {row.closed_by.value}, and was finished in time"
                )
        if row.group_id != self._truth.group_id:
            yield Problem("wrong", row.rollout_id, f"is in group {row.group_id!r}, expected {self._truth.group_id!r}")
        if self._truth.is_superseded(attempt) and row.status is RolloutStatus.ABORTED:
            return
        if row.closed_by is ClosedBy.BARRIER and (row.status.value, orjson.loads(row.outcome)) not in [
            _finish_of(line) for line in attempt.finishes
        ]:
            yield Problem("wrong", row.rollout_id, f"{key} is {row.status.value} {row.outcome}, which nobody sent")

    def groups(self) -> Iterator[Problem]:
        """The group was closed with the right rollouts; one that is in no group is a dead letter."""
        truth, groups = self._truth, self._evidence.groups
        first = next((group for group in groups if group.revision == 0), None)
        if first is None:
            if any(key not in self._held.rollouts for key in self._rows):
                yield Problem("lost", truth.group_id, "has rollouts, and was never closed")
            return
        members = {member.rollout_digest for group in groups for member in group.members}
        for key, rows in self._rows.items():
            if rows[0].digest not in members and key not in self._held.rollouts:
                yield Problem("lost", key[0], f"rollout {key} is in no group, and no dead letter")
        for group in groups:
            yield from self._members(group)
            if not any(b.group_revision == group.revision for b in self._evidence.built):
                yield Problem("lost", truth.group_id, f"revision {group.revision} was closed, and never built")
        if self.is_full and first.closed_by is not GroupClose.FULL:
            message = f"was closed as {first.closed_by.value}; all its rollouts were finished in time"
            yield Problem("lost", truth.group_id, message)

    def _members(self, group: Group) -> Iterator[Problem]:
        names = [member.rollout_id for member in group.members]
        if len(set(names)) != len(names):
            yield Problem("doubled", group.group_id, f"holds a rollout twice: {names}")
        if not set(names) <= set(self._truth.members) or group.group_size != len(self._truth.members):
            message = f"has {names} of {group.group_size}, expected them among {list(self._truth.members)}"
            yield Problem("wrong", group.group_id, message)
        digests = {row.digest for rows in self._rows.values() for row in rows}
        for member in group.members:
            last = self._truth.last_attempt(member.rollout_id)
            if member.rollout_digest not in digests:
                yield Problem(
                    "lost", member.rollout_id, f"is a member of {group.group_id!r}, and its rollout is not stored"
                )
            if self.is_full and last is not None and member.attempt != last.number:
                message = f"counts with attempt {member.attempt}, which attempt {last.number} has replaced"
                yield Problem("wrong", member.rollout_id, message)

    def built(self) -> Iterator[Problem]:
        """What was built of it, once `calls` has computed what the engine said."""
        check = BuiltCheck(self._truth, self._evidence, self._rules, self._rows, self._spoken)
        for built in self._evidence.built:
            yield from check.check(built)


def _sampled(call: ModelCall, prompt: Ids) -> Sampled:
    """What the engine said to this call. Raises: ValueError: the prompt is not made of its tokens."""
    return sample(
        from_ids(prompt),
        request_id=f"{call.call_id}-{call.call_attempt}",
        temperature=call.sampling.temperature,
        max_tokens=call.sampling.max_tokens,
        seed=call.sampling.seed,
    )


def _differences(call: ModelCall, tokens: bytes, expected: Sampled) -> Iterator[Problem]:
    """A whole output is the engine's; one that was cut short is its beginning."""
    logprobs = unpack_floats(call.output_logprobs)
    is_whole = call.outcome.is_whole
    if tokens != (expected.tokens if is_whole else expected.tokens[: len(tokens)]):
        yield Problem("wrong", call.call_id, f"output is {tokens!r}, the engine said {expected.tokens!r}")
    elif not np.array_equal(logprobs, np.array(expected.logprobs[: len(tokens)], dtype=np.float32)):
        yield Problem("wrong", call.call_id, "log-probabilities are not the engine's")
    elif is_whole and (call.version_spans, call.finish_reason) != (expected.spans, expected.finish_reason):
        message = f"spans and end are {call.version_spans} {call.finish_reason!r}, the engine said {expected.spans}"
        yield Problem("wrong", call.call_id, f"{message} {expected.finish_reason!r}")
    shown = orjson.loads(call.message).get("content")
    if shown is not None and shown != text_of(tokens):
        yield Problem("wrong", call.call_id, f"shows {shown!r}, its tokens are {text_of(tokens)!r}")


def _as_told(line: Line, calls: Sequence[ModelCall]) -> Iterator[Problem]:
    """One attempt of the call is what the client got, to what it asked."""
    seen = [
        call for call in calls if call.outcome.is_whole and orjson.loads(call.message).get("content") == line["text"]
    ]
    if not seen:
        yield Problem(
            "wrong", line["id"], f"the client got {line['text']!r}, which no stored attempt of the call says"
        )
        return
    call = seen[-1]
    told: list[tuple[str, object, object]] = [
        ("prompt", call.prompt.digest, line["prompt"]),
        ("prompt tokens", call.prompt.length, line["prompt_tokens"]),
        ("max_tokens", call.sampling.max_tokens, line["max_tokens"]),
        ("temperature", call.sampling.temperature, line["temperature"]),
        ("seed", call.sampling.seed, line["seed"]),
        ("finish reason", call.finish_reason, line["finish"]),
    ]
    if line["usage"] is not None:
        told.append(("usage", [call.prompt.length, len(call.output_ids) // 4], line["usage"]))
    for name, stored, sent in told:
        if stored != sent:
            yield Problem("wrong", line["id"], f"{name} is {stored!r}, the client has {sent!r}")


def _finish_of(line: Line) -> tuple[str, dict[str, float]]:
    """Status and outcome as sent."""
    return line["status"], {} if line["reward"] is None else {"reward": line["reward"]}
