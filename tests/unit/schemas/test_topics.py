"""Topic files, keys and envelopes."""

from __future__ import annotations

from rollstream.schemas.check import check_classes, check_compatibility, check_docs, check_topics
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import CreditScope, CreditStatistics, Group, GroupClose, GroupCredits, StageRef
from rollstream.schemas.topics import TERMINAL_TOPICS, key_of, topics
from tests.unit.schemas.calls import a_call


def test_schema_files_classes_and_topics_agree() -> None:
    """Every record class equals its file, is documented, and has a topic keyed by a field it has."""
    assert [*check_classes(), *check_docs(), *check_topics(), *check_compatibility()] == []


def test_terminals_may_stand_in_all_three_source_topics() -> None:
    """The barrier is allowed wherever the gateway writes it."""
    assert all("terminal" in topics()[noun].records for noun in TERMINAL_TOPICS)


def test_everything_of_a_group_has_the_group_as_key() -> None:
    """A call and a stage's record of the same group have equal keys, so that they share a partition."""
    stage = StageRef("group", "group", 1, "c")
    group = Group("g-1", 0, 1, "t", GroupClose.FULL, (), (), 5, "", stage, "p", "d")
    credits = GroupCredits(
        group, "r", CreditScope.ROLLOUT, (), (), CreditStatistics(0, 0, 0, 0), "", stage, "s", (), "p", "d"
    )

    assert key_of(a_call("c")) == key_of(group) == key_of(credits) == b"g-1"
    assert {t.family for t in topics().values() if t.key == "group_id"} == {"rollout"}


def test_envelope_names_the_record_and_carries_its_time() -> None:
    """A message has CloudEvents headers, the record's event time, and an id that depends on content alone."""
    call = a_call("c")

    message = to_message(call, Codec(), prefix="rollstream", source="/gateway")

    assert message.topic == "rollstream.calls.v1"
    assert message.timestamp_ms == call.finished_at_ms
    assert dict(message.headers)["ce_type"] == b"rollstream.model_call"
    assert message == to_message(call, Codec(), prefix="rollstream", source="/gateway")
