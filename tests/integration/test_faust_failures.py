"""Four ways in which a Faust app loses events, each staged on Apache Kafka: the shell does not inherit them.

* State behind the offset: after a kill, offsets are committed whose effect on the state is lost.
* An exception acknowledges the event: Faust's agent skips it, and the worker goes on.
* A decode error acknowledges the event: nothing is left of it.
* A commit past a gap: 0 and 4 open, 1, 2, 3, 5 finished, and 6 is committed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from rollstream.processors.shell.admission import partition_of
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import Rollout
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from tests.integration.shell_fixtures import (
    Make,
    committed_by_group,
    is_done,
    outputs,
    write,
)
from tests.integration.shell_log import Writer, ends, read, rollouts
from tests.unit.processors.shell.stages import SOURCES, ended, observed, opened

pytestmark = pytest.mark.kafka

BUG = '"bug"'
PARTITIONS = 3


def _group_in(partition: int, number: int = 0) -> str:
    names = (f"x{at}" for at in range(10_000))
    return [name for name in names if partition_of(name.encode(), PARTITIONS) == partition][number]


def _whole(rollout: str, group: str, *texts: str, size: int = 1):  # type: ignore[no-untyped-def]
    yield "calls", opened(rollout, group=group, size=size)
    for text in texts:
        yield "environment", observed(rollout, text, group=group)
    for noun in SOURCES:
        yield noun, ended(rollout, group=group, size=size)


def _rollouts(kafka: KafkaSettings) -> dict[str, Rollout]:
    codec = Codec()
    found = [codec.decode(value) for _, _, value, _ in read(kafka, "rollouts")]
    return {record.rollout_id: record for record in found if isinstance(record, Rollout)}


def test_state_is_never_behind_the_offset(shell_topics: KafkaSettings, worker: Make) -> None:
    """A rollout of which one half was read before SIGKILL, with commits all around it, is whole in the end."""
    group = _group_in(0)
    write(
        shell_topics,
        [("calls", opened("half", group=group, size=1)), ("environment", observed("half", "one", group=group))],
    )
    process = worker(shell_topics.prefix, "w")
    process.start()
    write(shell_topics, rollouts(0, 300))
    process.wait_until(
        lambda: committed_by_group(shell_topics).get(("terminals", 0), 0) > 0, 60, "others are committed"
    )
    process.kill()
    write(shell_topics, [("environment", observed("half", "two", group=group))])

    process.start()
    write(shell_topics, [(noun, ended("half", group=group, size=1)) for noun in SOURCES])
    process.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert ['"one"', '"two"'] == [event.content for event in _rollouts(shell_topics)["half"].events]


def test_exception_acknowledges_nothing(shell_topics: KafkaSettings, worker: Make) -> None:
    """A bug in a stage stops the worker in front of the event, however often it starts; the fixed one processes it."""
    group = _group_in(1)
    write(shell_topics, _whole("before", _group_in(1, 1)))
    write(shell_topics, _whole("stumbles", group, "bug", "and on"))
    write(shell_topics, _whole("behind", _group_in(1, 2)))
    process = worker(shell_topics.prefix, "w")

    for _ in range(2):
        process.start()
        assert process.wait_exit(60) == 1
    before = committed_by_group(shell_topics)
    fixed = worker(shell_topics.prefix, "w", "fixed")
    fixed.start()
    fixed.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert "a bug in the stage" in process.log_text()
    assert before.get(("environment", 1), 0) <= 1, "the event with the bug stands at offset 1"
    assert [BUG, '"and on"'] == [event.content for event in _rollouts(shell_topics)["stumbles"].events]
    assert {"before", "stumbles", "behind"} == set(_rollouts(shell_topics))
    assert [] == read(shell_topics, "dead-letters")


def test_decode_error_acknowledges_nothing_before_its_dead_letter_is_written(
    shell_topics: KafkaSettings,
    worker: Make,
) -> None:
    """Where the broker refuses the dead letter, the worker stops in front of the bytes; later they are in there once."""
    _limit_dead_letters(shell_topics, "10")
    writer = Writer(shell_topics)
    writer.write_bytes("calls", b"\xc3\x01nonsense", 1)
    writer.flush()
    write(shell_topics, rollouts(0, 200))
    process = worker(shell_topics.prefix, "w")
    process.start()

    code, told = process.wait_exit(90), process.log_text()
    before = committed_by_group(shell_topics)
    _limit_dead_letters(shell_topics, "1000000")
    process.start()
    process.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert (1, 0) == (code, before.get(("calls", 1), 0))
    assert f"{shell_topics.prefix}.dead-letters.v1 (one that is too large" in told
    [(_, _, value, _)] = read(shell_topics, "dead-letters")
    assert b"\xc3\x01nonsense" in value


def _limit_dead_letters(kafka: KafkaSettings, limit_bytes: str) -> None:
    name = topics()["dead-letters"].name(kafka.prefix)
    entry = ConfigEntry("max.message.bytes", limit_bytes, incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in admin.incremental_alter_configs([changed]).values():
        future.result(30)
    asked = ConfigResource(ConfigResource.Type.TOPIC, name)
    while admin.describe_configs([asked])[asked].result(30)["max.message.bytes"].value != limit_bytes:
        pass  # each answer takes a round trip; the broker applies the change a moment after it was taken


def test_commit_stops_at_a_gap(shell_topics: KafkaSettings, worker: Make) -> None:
    """Events 0 and 4 of a partition open, 1, 2, 3 and 5 finished: 0 is committed; with 0 finished as well, 4."""
    groups = [_group_in(2, number) for number in range(4)]
    write(shell_topics, [("environment", observed("a", "0", group=groups[0]))])
    write(shell_topics, [("environment", observed("b", text, group=groups[1])) for text in "123"])
    write(shell_topics, [("environment", observed("c", "4", group=groups[2]))])
    write(shell_topics, [("environment", observed("d", "5", group=groups[3]))])
    _finish(shell_topics, "b", groups[1])
    _finish(shell_topics, "d", groups[3])
    process = worker(shell_topics.prefix, "w")
    process.start()

    process.wait_until(
        lambda: committed_by_group(shell_topics).get(("terminals", 2)) == 2, 60, "b and d are committed"
    )
    first = committed_by_group(shell_topics).get(("environment", 2), 0)
    _finish(shell_topics, "a", groups[0])
    process.wait_until(lambda: committed_by_group(shell_topics).get(("terminals", 2)) == 3, 60, "a is committed")
    second = committed_by_group(shell_topics).get(("environment", 2), 0)
    _finish(shell_topics, "c", groups[2])
    process.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert (0, 4) == (first, second)


def _finish(kafka: KafkaSettings, rollout: str, group: str) -> None:
    write(kafka, [("calls", opened(rollout, group=group, size=1))])
    write(kafka, [(noun, ended(rollout, group=group, size=1)) for noun in SOURCES])


def test_commit_waits_for_the_acknowledgement(shell_topics: KafkaSettings, worker: Make, tmp_path: Path) -> None:
    """While the rollouts of one partition are not with the broker, nothing of that partition is committed."""
    write(shell_topics, rollouts(0, 300))
    release = tmp_path / "go"
    process = worker(shell_topics.prefix, "w", f"hold:{release}")
    process.start()

    def others_are_done() -> bool:
        found = committed_by_group(shell_topics)
        return all(found.get(at) == end for at, end in ends(shell_topics).items() if at[1] != 0)

    process.wait_until(others_are_done, 60, "the other partitions are committed")
    before = {at: offset for at, offset in committed_by_group(shell_topics).items() if at[1] == 0}
    release.touch()
    process.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert {} == before
    assert 300 == len(_rollouts(shell_topics))


def test_bad_deploy_stops_and_is_repaired(shell_topics: KafkaSettings, worker: Make) -> None:
    """A worker that understands nothing stops, commits nothing, and drains nothing, however often it is started.

    The deploy after it processes every event.
    """
    records = list(rollouts(0, 600))
    write(shell_topics, records)
    bad = worker(shell_topics.prefix, "w", "bad")

    codes = []
    for _ in range(3):
        bad.start()
        codes.append(bad.wait_exit(60))
    stopped = committed_by_group(shell_topics)
    buried = len({value for _, _, value, _ in read(shell_topics, "dead-letters")})
    good = worker(shell_topics.prefix, "w")
    good.start()
    good.wait_until(lambda: is_done(shell_topics), 90, "everything is committed")

    assert ([1, 1, 1], {}) == (codes, stopped)
    assert "dead_letter_limit" in bad.log_text()
    assert buried < 100 < len(records) / 10
    assert (600, 300) == (len(_rollouts(shell_topics)), len(outputs(shell_topics)["samples"]))
