"""The audit where calls go by claim: the content is there, is gone, or is another, for the worker, for the sink, or for both."""

from __future__ import annotations

import pytest

from rollstream.errors import SchemaError
from rollstream.schemas.codec import Codec, claim_name
from rollstream.schemas.records import DeadLetter, EnvironmentEvent, EventKind, ModelCall
from rollstream.schemas.records.claims import ClaimCheck
from rollstream.schemas.topics import topics
from rollstream.schemas.types import Json
from rollstream.sinks.audit import AuditReport, audit_evidence
from rollstream.sinks.base import LogRecord, Source
from rollstream.sinks.check_accounted import quarantine
from rollstream.sinks.decode import decode_record
from rollstream.sinks.stored import PARTS, Evidence
from rollstream.sinks.tables import is_stored, table_of
from tests.memory_claims import MemoryClaims
from tests.source_log import source_log
from tests.unit.processors.records import OPENED_MS
from tests.unit.processors.shell.line import Line

INLINE_BYTES = 200
"""Calls and what holds them go by claim; openings, intents and terminals do not."""
ROLLOUT, CALL = "g-0.r-0", "g-0.r-0.c-0"
REASONS = ("claim_missing", "claim_mismatch")
NOW_MS = OPENED_MS + 60_000


class _Look(MemoryClaims):
    """The claim store as one process finds it. Args: stored: what all processes have put there."""

    def __init__(self, stored: dict[str, bytes]) -> None:
        super().__init__()
        self.stored = stored
        self.spoilt: dict[str, bytes | None] = {}
        """What it finds instead, by name; None: nothing."""

    def get(self, name: str) -> bytes:
        found = self.spoilt.get(name, self.stored.get(name))
        if found is None:
            raise SchemaError(f"no claim {name!r}", reason="claim_missing")
        return found

    def spoil(self, check: ClaimCheck, reason: str) -> None:
        """Let it find the content gone, or changed."""
        self.spoilt[claim_name(check.digest)] = None if reason == "claim_missing" else b"other"


class _World:
    """A worker and a sink that read one log, each with a look of its own at the claim store."""

    def __init__(self) -> None:
        stored: dict[str, bytes] = {}
        self.claims, self.seen_by_sink = _Look(stored), _Look(stored)
        self.codec = Codec(claims=self.claims, inline_bytes=INLINE_BYTES)
        self.sink_codec = Codec(claims=self.seen_by_sink, inline_bytes=INLINE_BYTES)
        self.line = Line(self.codec)
        for noun, record in source_log(groups=1, size=3, seed=3, start_ms=OPENED_MS):
            self.line.write(noun, record)

    def last_of(self, kind: type) -> ClaimCheck:
        """The check for the last record of a kind; no other call's prompt builds on it."""
        checks = [
            found
            for noun in ("calls", "environment")
            for value in self.line.values(noun)
            if isinstance(found := self.codec.decode_frame(value or b""), ClaimCheck)
            and isinstance(self.codec.decode(value or b""), kind)
        ]
        return checks[-1]

    async def run(self) -> None:
        """The worker makes of it what there is to make."""
        self.line.start()
        self.line.go_on(NOW_MS)
        await self.line.end_scorers()
        self.line.go_on(NOW_MS)

    def audited(self) -> AuditReport:
        """What the sink stores, and what the audit says of it."""
        groups: dict[str, Evidence] = {}
        letters: list[DeadLetter] = []
        for noun, messages in self.line.topics.items():
            source = Source(topics()[noun].name(), 0, "id-0")
            for m in messages:
                raw = LogRecord(m.offset, m.value or b"", m.key, m.timestamp)
                record = decode_record(source, raw, self.sink_codec).record
                if isinstance(record, DeadLetter):
                    letters.append(record)
                elif is_stored(record, source.topic):
                    table = table_of(type(record))
                    for row in table.rows(record):
                        group = groups.setdefault(row.group_id, Evidence(row.group_id))
                        getattr(group, PARTS[table.name]).append(row)
        held = quarantine(letters, self.sink_codec)
        return audit_evidence(iter(groups.values()), held=held, bounds={}, unknown_samples=[], counts={})


def _places(report: AuditReport) -> dict[str, int]:
    return {key.removeprefix("calls "): number for key, number in report.counts.items() if number}


async def test_calls_that_went_by_claim_are_in_samples() -> None:
    """Nobody sees that they were large."""
    world = _World()
    await world.run()

    report = world.audited()

    assert report.ok, str(report)
    assert {"in samples": 8, "masked": 1} == _places(report)
    assert world.claims.puts > len(world.line.topics["samples"])


@pytest.mark.parametrize("reason", REASONS)
async def test_call_whose_content_is_gone_is_lost_to_its_rollout_and_accounted(reason: str) -> None:
    """Its intent is in the log: the rollout says that the outcome is lost, and the call is masked for it."""
    world = _World()
    check = world.last_of(ModelCall)
    for claims in (world.claims, world.seen_by_sink):
        claims.spoil(check, reason)
    await world.run()

    report = world.audited()

    letters = [record for record in world.line.records("dead-letters") if isinstance(record, DeadLetter)]
    assert [("decode", reason, check.rollout_id, check.call_id)] == [
        (letter.boundary, letter.reason, letter.rollout_id, letter.call_id) for letter in letters
    ]
    assert report.ok, str(report)
    assert {"in samples": 7, "masked": 2} == _places(report)


@pytest.mark.parametrize("reason", REASONS)
async def test_call_whose_content_only_the_sink_misses_is_found(reason: str) -> None:
    """The worker had it, so it is in a sample, and the store cannot show what the sample was made of."""
    world = _World()
    check = world.last_of(ModelCall)
    await world.run()
    world.seen_by_sink.spoil(check, reason)

    report = world.audited()

    [sample] = report.findings["token_traceable"]
    assert f"call {check.call_id!r} is not stored in rollout {check.rollout_id!r}" == sample.message
    assert {check.rollout_id} == {finding.about for finding in report.findings["rollout_traceable"]}


async def test_tool_result_whose_content_is_gone_accounts_for_no_call() -> None:
    """Its claim check names the call that it answers; the letter of it holds no call."""
    world = _World()
    content = Json(f'"{"x" * INLINE_BYTES}"')
    result = EnvironmentEvent("large", ROLLOUT, 0, "g-0", EventKind.TOOL_RESULT, content, OPENED_MS, CALL)
    world.line.write("environment", result)
    check = world.last_of(EnvironmentEvent)
    value = next(v for v in world.line.values("environment") if world.codec.claim_check(v or b"") == check)
    for claims in (world.claims, world.seen_by_sink):
        claims.spoil(check, "claim_missing")
    await world.run()

    letters = [record for record in world.line.records("dead-letters") if isinstance(record, DeadLetter)]
    held = quarantine(letters, world.codec)

    assert [(value, CALL)] == [(letter.value, letter.call_id) for letter in letters]
    assert set() == held.call_ids
    assert world.audited().ok
