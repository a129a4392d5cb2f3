"""The sample reader on Apache Kafka: whole groups once, from a position in the trainer's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from rollstream.errors import BrokerError, TrainerError
from rollstream.kafka import client_properties, producer_properties
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import Consumption, Record, SkippedGroup
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.trainers import SampleReader
from tests.unit.trainers.samples import make_built, make_group

pytestmark = pytest.mark.kafka

CODEC = Codec()
WAIT_S = 20.0


def _produce(kafka: KafkaSettings, records: Iterable[Record]) -> None:
    producer = Producer(producer_properties(kafka))
    for record in records:
        message = to_message(record, CODEC, prefix=kafka.prefix, source="/test")
        producer.produce(message.topic, message.value, key=message.key, timestamp=message.timestamp_ms)
    assert producer.flush(WAIT_S) == 0


def _consumptions(kafka: KafkaSettings, count: int) -> list[Consumption]:
    consumer = Consumer({"group.id": "look", **client_properties(kafka)})
    consumer.assign([TopicPartition(topics()["consumptions"].name(kafka.prefix), 0, 0)])
    found = [CODEC.decode(message.value() or b"") for message in consumer.consume(count, WAIT_S)]
    consumer.close()
    assert all(isinstance(record, Consumption) for record in found)
    return found  # type: ignore[return-value]


def test_reader_hands_out_whole_groups_once(kafka_settings: KafkaSettings) -> None:
    """Groups of all partitions, a doubled one once."""
    _produce(kafka_settings, [r for i in range(8) for r in make_group(f"g{i}")])
    _produce(kafka_settings, make_group("g0"))
    _produce(kafka_settings, make_group("last"))

    with SampleReader(kafka_settings, trainer="run") as reader:
        groups = reader.next_groups(9, WAIT_S)
        none_left = reader.next_groups(1, 0.5)

    assert {*(f"g{i}" for i in range(8)), "last"} == {group.group_id for group in groups}
    assert all(len(group.samples) == 2 for group in groups)
    assert [] == none_left


def test_new_reader_goes_on_where_the_checkpoint_says(kafka_settings: KafkaSettings) -> None:
    """What was handed out does not come again, what was only buffered does."""
    _produce(kafka_settings, [r for i in range(6) for r in make_group(f"g{i}")])
    with SampleReader(kafka_settings, trainer="run") as reader:
        first = reader.next_groups(2, WAIT_S)
        checkpoint = json.dumps(reader.position())

    with SampleReader(kafka_settings, trainer="run") as reader:
        reader.seek(json.loads(checkpoint))
        rest = reader.next_groups(4, WAIT_S)

    assert sorted(f"g{i}" for i in range(6)) == sorted(group.group_id for group in [*first, *rest])


def test_step_is_recorded_with_what_was_skipped(kafka_settings: KafkaSettings) -> None:
    """Stale, spreadless, foreign and empty groups are read, not trained on, and told."""
    _produce(
        kafka_settings,
        [
            *make_group("fresh", version=9),
            *make_group("old", version=3),
            *make_group("flat", version=9, has_spread=False),
            *make_group("foreign", version=9, policy="other"),
            make_built("empty", ()),
        ],
    )

    with SampleReader(
        kafka_settings, trainer="run", version=10, max_staleness=2, skip_no_spread=True, clock_ms=lambda: 77
    ) as reader:
        groups = reader.next_groups(5, 5.0)
        first = reader.record_step(step=4, version_before=10, version_after=11, groups=groups, checkpoint="ckpt")
        again = reader.record_step(step=4, version_before=10, version_after=11, groups=groups)

    (step, repeated) = _consumptions(kafka_settings, 2)
    assert ["fresh"] == [group.group_id for group in groups]
    assert (4, 10, 11, "ckpt", 77) == (
        step.step,
        step.version_before,
        step.version_after,
        step.checkpoint,
        step.at_ms,
    )
    assert (("fresh-0", "fresh-1"), ("fresh",)) == (step.sample_ids, step.group_ids)
    assert {
        SkippedGroup("old", "stale"),
        SkippedGroup("flat", "no_spread"),
        SkippedGroup("foreign", "other_policy"),
        SkippedGroup("empty", "no_samples"),
    } == set(step.skipped)
    assert first == again == repeated.consumption_id
    assert () == repeated.skipped
    assert reader.version == 11


def test_staleness_is_measured_when_a_group_is_handed_out(kafka_settings: KafkaSettings) -> None:
    """A group in the buffer grows old while the trainer steps."""
    _produce(kafka_settings, [*make_group("a", version=5), *make_group("b", version=5)])

    with SampleReader(kafka_settings, trainer="run", version=5, max_staleness=1) as reader:
        one = reader.next_groups(1, WAIT_S)
        reader.record_step(step=0, version_before=5, version_after=7, groups=one)
        two = reader.next_groups(1, 2.0)

    assert len(one) == 1
    assert [] == two


def test_reader_that_starts_late_skips_what_it_cannot_have_whole(kafka_settings: KafkaSettings) -> None:
    """A group whose first samples were before the start is told as cut."""
    head, *tail = make_group("g", 2)
    _produce(kafka_settings, [head])
    with SampleReader(kafka_settings, trainer="run", start="latest", max_staleness=None) as reader:
        _produce(kafka_settings, [*tail, *make_group("h")])
        groups = reader.next_groups(1, WAIT_S)
        reader.next_groups(1, 1.0)
        reader.record_step(step=0, version_before=0, version_after=1, groups=groups)

    (step,) = _consumptions(kafka_settings, 1)
    assert ["h"] == [group.group_id for group in groups]
    assert (SkippedGroup("g", "cut"),) == step.skipped


def test_position_of_another_topic_is_refused(kafka_settings: KafkaSettings) -> None:
    """A checkpoint of another deployment would read anywhere."""
    with SampleReader(kafka_settings, trainer="run") as reader:
        position = reader.position()
        with pytest.raises(TrainerError, match="the position is of topic 'x'"):
            reader.seek({**position, "topic": "x"})
        gone = {**position, "partitions": {"0": {"offset": 1_000, "done": []}}}
        with pytest.raises(TrainerError, match="cannot seek to offset 1000"):
            reader.seek(gone)


def test_missing_topic_says_what_to_do(kafka_settings: KafkaSettings) -> None:
    """The usual mistake is the prefix."""
    with pytest.raises(BrokerError, match="rollstream topics apply"):
        SampleReader(kafka_settings.model_copy(update={"prefix": "nowhere"}), trainer="run")


def test_reader_skips_what_it_cannot_read_and_later_revisions(
    kafka_settings: KafkaSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken record and a foreign one cost their groups alone; a revision is for who asks for it; all of it is told."""
    topic = topics()["samples"].name(kafka_settings.prefix)
    stray = Consumption("c", "other", 0, "default", 0, 1, (), (), (), 1)
    producer = Producer(producer_properties(kafka_settings))
    producer.produce(topic, b"no record", key=b"broken")
    producer.produce(topic, CODEC.encode(stray), key=b"foreign")
    assert producer.flush(WAIT_S) == 0
    later = [replace(record, group_revision=1) for record in make_group("later")]
    _produce(kafka_settings, [*make_group("broken")[1:], *make_group("foreign")[1:], *later, *make_group("good")])

    with SampleReader(kafka_settings, trainer="run") as reader:
        groups = reader.next_groups(4, 5.0)
        reader.record_step(step=0, version_before=0, version_after=1, groups=groups)
        unreadable = reader.unreadable
    with SampleReader(kafka_settings, trainer="run", revisions=True) as reader:
        with_revisions = reader.next_groups(4, 5.0)

    (step,) = _consumptions(kafka_settings, 1)
    assert ["good"] == [group.group_id for group in groups]
    assert {"good", "later"} == {group.group_id for group in with_revisions}
    assert {
        SkippedGroup("broken", "unreadable"),
        SkippedGroup("foreign", "unreadable"),
        SkippedGroup("later", "revision"),
    } == set(step.skipped)
    assert 2 == unreadable
    assert any("it is a Consumption, expected a Sample" in record.getMessage() for record in caplog.records)
