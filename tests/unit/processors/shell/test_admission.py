"""Records that stand where they do not belong."""

from __future__ import annotations

import pytest

from rollstream.errors import SchemaError
from rollstream.processors.base import Position
from rollstream.processors.shell.admission import Admission, kinds_by_topic, partition_of
from tests.unit.processors.shell.stages import ended, opened


@pytest.mark.parametrize(
    ("key", "partition"), [(b"g", 3), (b"group-1", 1), (b"0b6ad16a-9d6c-4f8a-a1f5-9f5e2f9a6d11", 0), (b"", 3)]
)
def test_partition_of_a_key_is_that_of_the_jvm(key: bytes, partition: int) -> None:
    """Values of `Utils.toPositive(Utils.murmur2(key)) % 6` of Apache Kafka's own client."""
    assert partition == partition_of(key, 6)


def test_record_of_another_topic_is_refused() -> None:
    """It names what it is and what was expected."""
    admission = Admission(kinds=kinds_by_topic())

    with pytest.raises(
        SchemaError, match=r"RolloutOpened in topic 'terminals': expected one of \['Terminal'\]"
    ) as caught:
        admission.check(Position("terminals", 0, 7), opened("r1"))

    assert caught.value.reason == "foreign_record"


def test_record_of_a_group_that_lives_elsewhere_is_refused() -> None:
    """Whatever the message's own key was: the group decides who sees its records together."""
    right = partition_of(b"g", 6)
    admission = Admission(6, kinds_by_topic())
    admission.check(Position("calls", right, 7), opened("r1", group="g"))

    with pytest.raises(SchemaError, match=f"expected it in partition {right} of 6") as caught:
        admission.check(Position("calls", right + 1, 7), opened("r1", group="g"))

    assert caught.value.reason == "wrong_partition"


def test_terminal_is_taken_in_all_three_source_topics() -> None:
    """The barrier stands in each."""
    admission = Admission(kinds=kinds_by_topic())

    for noun in ("calls", "environment", "terminals"):
        admission.check(Position(noun, 0, 7), ended("r1"))
