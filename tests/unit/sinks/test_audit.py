"""The audit: silent on a whole run, loud on every changed field, and able to tell open from lost."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from rollstream.errors import AuditError
from rollstream.schemas.derive import optional_hint
from rollstream.schemas.records import CallDelivery, CallStarted, Consumption, Delivery, ModelCall
from rollstream.schemas.types import Json, PackedFloats, PackedIds, PackedMask
from rollstream.sinks.audit import AuditReport, audit, audit_evidence
from rollstream.sinks.check_accounted import Quarantine, quarantine
from rollstream.sinks.clickhouse import ClickHouseSink
from rollstream.sinks.columns import field_hints
from rollstream.sinks.stored import PARTS, Evidence, Stored
from tests.unit.sinks.chain import CODEC, Log, make_log

NOT_CHECKED = {
    "openings": {
        "rollout_id",
        "attempt",
        "group_id",
        "opened_at_ms",
    },  # a rollout needs no opening; its copy is checked
    "starts": {
        "group_id",
        "started_at_ms",
        "call_attempt",
    },  # an intent without an outcome is a lost call, as it may be
    "deliveries": {"rollout_id", "attempt", "group_id", "reason", "at_ms"},  # found by call
    "terminals": {"group_id", "group_size", "task_id", "expected_calls", "expected_events"},  # the opening's count
    "scores": {"score.latency_ms"},  # outside every digest
    "built": {"group_id"},  # rows are found by group
}
"""Fields of source rows that nothing derived is made from. Everything a sample rests on is checked."""


@pytest.fixture(scope="module")
def evidence(engine: str, log: Log) -> Iterator[tuple[list[Evidence], Quarantine]]:
    from rollstream.sinks.connect import connect

    client = connect(f"{engine}?database=audit_matrix")
    ClickHouseSink(client).write(log.chunks())
    stored = Stored(client)
    yield stored.load(stored.group_ids()), quarantine(stored.dead_letters(), CODEC)
    client.command("DROP DATABASE audit_matrix")


def _report(groups: list[Evidence], held: Quarantine) -> AuditReport:
    return audit_evidence(iter(groups), held=held, bounds={}, unknown_samples=[], counts={})


def _failed(report: AuditReport) -> set[str]:
    return {name for name, found in report.findings.items() if found}


def test_whole_run_passes_and_is_counted(client: Client, log: Log) -> None:
    """Every started call is accounted for; the open one is listed and is no failure."""
    ClickHouseSink(client).write(log.chunks())

    report = audit(client)

    assert report.ok, str(report)
    assert {"g-3-r0-c0": "rollout"} == report.open_calls
    starts = {r.call_id for r in log.records["calls"] if isinstance(r, CallStarted)}
    assert report.counts["calls started"] == len(starts)
    assert report.counts["dead letters"] == 3
    places = ("in samples", "masked", "quarantined", "open", "unaccounted")
    assert [8, 3, 1, 1, 0] == [report.counts[f"calls {place}"] for place in places]
    assert report.as_dict()["checks"]["token_traceable"] == {"ok": True, "failures": 0, "first": []}


def test_rows_stored_twice_pass(client: Client, log: Log) -> None:
    """Another cut of the log stores rows again; they count once."""
    sink = ClickHouseSink(client)
    sink.write(log.chunks())
    for chunk in log.chunks(5):
        sink.write([chunk])

    report = audit(client)

    assert report.ok, str(report)


def test_store_read_in_small_parts_gives_the_same_report(
    client: Client, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group and one dead letter at a time: what bounds the memory changes nothing."""
    from rollstream.sinks import stored

    ClickHouseSink(client).write(log.chunks())
    whole = audit(client)

    monkeypatch.setattr(stored, "BATCH_BYTES", 1)
    monkeypatch.setattr(stored, "_LETTERS_AT_ONCE", 2)

    assert whole.as_dict() == audit(client).as_dict()
    assert [1, 1, 1] == [len(batch) for batch in Stored(client).batches()]
    assert len(list(Stored(client).dead_letters())) == whole.counts["dead letters"] > 2


def test_open_call_fails_a_closed_audit(client: Client, log: Log) -> None:
    """After the end of a run nothing may wait any more."""
    ClickHouseSink(client).write(log.chunks())

    report = audit(client, closed=True)

    assert {"accounted"} == _failed(report)
    assert "waits for its rollout" in str(report)


def test_empty_store_passes(client: Client) -> None:
    """Nothing stored, nothing wrong."""
    report = audit(client)

    assert report.ok
    assert report.counts["calls started"] == 0


def test_store_without_tables_is_an_error(engine: str) -> None:
    """An audit of the wrong database must not pass."""
    from rollstream.sinks.connect import connect

    client = connect(f"{engine}?database=default", migrate=False)

    with pytest.raises(AuditError, match="is this a store that a sink wrote"):
        audit(client)


@pytest.mark.parametrize("table", PARTS)
def test_every_changed_field_is_found(evidence: tuple[list[Evidence], Quarantine], table: str) -> None:
    """Change one field of one row at a time, over all fields of all tables: some check fails."""
    groups, held = evidence
    part = PARTS[table]
    at = next(i for i, group in enumerate(groups) if group.group_id == "g-1")
    rows = getattr(groups[at], part)
    passed = set()
    tried = 0

    for name, row in _changed(rows[0]):
        tampered = copy.copy(groups[at])
        setattr(tampered, part, [row, *rows[1:]])
        tried += 1
        if _report([*groups[:at], tampered, *groups[at + 1 :]], held).ok:
            passed.add(name)

    assert tried >= 7
    assert NOT_CHECKED.get(part, set()) == passed


@pytest.mark.parametrize(
    "part",
    ["calls", "rollouts", "groups", "scores", "rewards", "credits", "samples", "events", "terminals", "deliveries"],
)
def test_every_missing_row_is_found(evidence: tuple[list[Evidence], Quarantine], part: str) -> None:
    """A row that was deleted leaves something behind that needs it."""
    groups, held = evidence
    at = next(i for i, group in enumerate(groups) if group.group_id == "g-1")
    for index, row in enumerate(getattr(groups[at], part)):
        if getattr(row, "call_id", "") in held.call_ids or str(getattr(row, "event_id", "")).startswith("g-1-r0-c3"):
            continue  # late: quarantined, so nothing needs it
        tampered = copy.copy(groups[at])
        setattr(tampered, part, [other for i, other in enumerate(getattr(groups[at], part)) if i != index])

        report = _report([*groups[:at], tampered, *groups[at + 1 :]], held)

        assert not report.ok, f"{part} {index}: {row}"


def test_call_that_vanished_is_not_accounted(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """A masked call without its mask: started, not in a sample, not masked, group built."""
    groups, held = evidence
    group = copy.copy(next(group for group in groups if group.group_id == "g-1"))
    group.built = [dataclasses.replace(group.built[0], masked=group.built[0].masked[1:])]

    report = _report([group], held)

    assert {"accounted"} == _failed(report)
    assert "g-1-r1-c1" == report.findings["accounted"][0].about


def test_late_call_is_accounted_by_its_dead_letter(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """Without the dead letter the same call fails."""
    groups, _ = evidence

    report = _report(groups, Quarantine())

    assert {"accounted"} == _failed(report)
    assert {"g-1-r0-c3"} == {finding.about for finding in report.findings["accounted"]}


def test_second_content_under_one_identity_is_found(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """Two stages with different configuration wrote the same group."""
    groups, held = evidence
    group = copy.copy(next(group for group in groups if group.group_id == "g-1"))
    other = dataclasses.replace(group.calls[0], finish_reason="length")
    group.calls = [*group.calls, other]

    report = _report([group], held)

    assert "identity" in _failed(report)


def test_token_trained_twice_is_found(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """A second sample over the same call."""
    groups, held = evidence
    group = copy.copy(next(group for group in groups if group.group_id == "g-2"))
    twin = dataclasses.replace(group.samples[0], sample_id="twin", sample_index=1)
    group.samples = [*group.samples, twin]
    group.built = [dataclasses.replace(group.built[0], sample_ids=(*group.built[0].sample_ids, "twin"))]

    report = _report([group], held)

    assert {"token_traceable", "packing"} <= _failed(report)


def test_naive_weights_per_sample_are_found(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """1/n_s of each row's own tokens favours rollouts with many rows; the mass check says so."""
    groups, held = evidence
    group = copy.copy(next(group for group in groups if group.group_id == "g-1"))
    group.samples = [dataclasses.replace(s, loss_weight=1 / s.sampled_tokens) for s in group.samples]

    report = _report([group], held)

    assert {"packing"} == _failed(report)


def test_clipped_reward_passes_at_its_bound_only(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """The configuration is a digest; the highest stored reward under it is the bound."""
    from rollstream.sinks.check_rewards import _reward

    groups, _ = evidence
    row = next(group for group in groups if group.group_id == "g-1").rewards[0]
    component = dataclasses.replace(row.reward.components[0], raw=30.0, value=30.0)
    clipped = dataclasses.replace(row, reward=dataclasses.replace(row.reward, components=(component,), value=10.0))

    at_bound = list(_reward(clipped, {row.stage.config_digest: (-10.0, 10.0)}))
    below = list(_reward(clipped, {row.stage.config_digest: (-10.0, 12.0)}))

    assert [] == at_bound
    assert "at neither bound" in below[0]


@pytest.mark.parametrize(
    ("table", "change", "check"),
    [
        ("samples", "ids = arrayMap((x, i) -> if(i = 3, x + 1, x), ids, arrayEnumerate(ids))", "token_traceable"),
        ("model_calls", "output_logprobs = arrayMap(x -> x * 2, output_logprobs)", "token_traceable"),
        ("scores", "value = value + 1", "score_reviewable"),
        ("credits", "value = value * 2", "rollout_traceable"),
        ("samples", "loss_weight = loss_weight * 2", "packing"),
        ("environment_events", "content = '{}'", "rollout_traceable"),
        ("terminals", "status = 'failed'", "rollout_traceable"),
    ],
)
def test_row_changed_in_the_store_fails_its_check(
    client: Client, log: Log, table: str, change: str, check: str
) -> None:
    """The whole way: a mutation in ClickHouse, then the audit."""
    ClickHouseSink(client).write(log.chunks())
    client.command(f"ALTER TABLE {table} UPDATE {change} WHERE 1 SETTINGS mutations_sync = 2")

    report = audit(client)

    assert check in _failed(report)
    assert not report.ok
    assert "FAIL" in str(report)


def test_consumed_sample_that_is_not_stored_is_found(client: Client, log: Log) -> None:
    """A trainer trained on something the store does not have."""
    from rollstream.sinks.base import Chunk, LogRecord, Source

    step = Consumption("c-1", "run", 0, "default", 3, 4, ("nowhere",), ("g-1",), (), 5)
    chunk = Chunk(Source("rollstream.consumptions.v1", 0), 0, 0, (LogRecord(0, CODEC.encode(step)),))
    ClickHouseSink(client).write([*log.chunks(), chunk])

    report = audit(client)

    assert {"consumed"} == _failed(report)
    assert "nowhere" in report.findings["consumed"][0].message


def test_quarantined_group_accounts_for_its_members_calls() -> None:
    """A dead letter of a whole group holds what its members called."""
    log = make_log()
    from rollstream.schemas.records import DeadLetter

    group = log.records["groups"][0]
    letter = DeadLetter("x", "score", "r", "m", "t", 0, 0, CODEC.encode(group), 0)

    held = quarantine([letter], CODEC)

    assert {(m.rollout_id, m.attempt) for m in group.members} == held.rollouts  # type: ignore[union-attr]


def test_unreadable_dead_letter_accounts_for_what_it_names() -> None:
    """The bytes say nothing; the fields do."""
    from rollstream.schemas.records import DeadLetter

    held = quarantine([DeadLetter("x", "decode", "r", "m", "t", 0, 0, b"junk", 0, call_id="c-9")], CODEC)

    assert {"c-9"} == held.call_ids


def test_delivery_that_the_rollout_did_not_hear_is_found(evidence: tuple[list[Evidence], Quarantine]) -> None:
    """A call that did not arrive may not be trained on as if it had."""
    groups, held = evidence
    group = copy.copy(next(group for group in groups if group.group_id == "g-2"))
    call = group.calls[0]
    assert isinstance(call, ModelCall)
    told = CallDelivery(call.call_id, call.rollout_id, 0, "g-2", Delivery.NONE, "ack_timeout", 5)
    group.deliveries = [told]

    report = _report([group], held)

    assert {"accounted"} == _failed(report)


def _changed(row: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The row with one field changed, for each field; of a list of records the first one's fields."""
    for name, hint in field_hints(type(row)):
        value = getattr(row, name)
        if dataclasses.is_dataclass(value):
            for inner, changed in _changed(value, f"{prefix}{name}."):
                yield inner, dataclasses.replace(row, **{name: changed})
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for inner, changed in _changed(value[0], f"{prefix}{name}[0]."):
                yield inner, dataclasses.replace(row, **{name: (changed, *value[1:])})
        else:
            other = _other(value, hint)
            if other is not None and other != value:
                yield prefix + name, dataclasses.replace(row, **{name: other})


def _other(value: Any, hint: Any) -> Any:
    inner, _ = optional_hint(hint)
    if value is None:
        return {str: "x", int: 1, float: 1.0, bool: True, Json: "{}"}.get(inner)
    if inner in (PackedIds, PackedMask, PackedFloats):
        first = bytes([value[0] ^ 1]) if inner is not PackedFloats else value[:1]
        last = bytes([value[-1] ^ 1]) if inner is PackedFloats else value[-1:]
        return first + value[1:-1] + last
    if typing.get_origin(inner) is tuple:
        return (*value, "x") if typing.get_args(inner)[0] is str else None
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        members = list(inner)
        return members[(members.index(value) + 1) % len(members)]
    if inner is bool:
        return not value
    return value + 1 if inner in (int, float) else value + " "
