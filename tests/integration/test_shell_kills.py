"""The shell on Apache Kafka: what SIGKILL, a frozen worker and a second worker do to the outputs. They do nothing.

Every run is compared with an undisturbed run over the same input: the same values, byte for byte, once doubled messages
are taken out; and every offset committed in the end.
"""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from rollstream.settings import KafkaSettings
from tests.integration.shell_fixtures import OUTPUTS, Make, committed_by_group, is_done, new_worker, outputs, write
from tests.integration.shell_log import Writer, ends, kafka_settings, make_topics, read, rollouts
from tests.services.kafka import KafkaBroker

ROLLOUTS = 1_800
RECORDS = list(rollouts(0, ROLLOUTS))
PARTS = [RECORDS[part * len(RECORDS) // 3 : (part + 1) * len(RECORDS) // 3] for part in range(3)]
"""The input in three parts; some forty rollouts are open where one part ends."""

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def undisturbed(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[bytes, bytes]]]:
    """What an undisturbed run writes."""
    settings = kafka_settings(kafka.bootstrap, f"calm{uuid.uuid4().hex[:8]}")
    make_topics(settings)
    write(settings, RECORDS)
    with new_worker(kafka, tmp_path_factory.mktemp("calm") / "calm.log", settings.prefix, "calm") as process:
        process.wait_until(lambda: is_done(settings), 60, "everything is committed")
    found = outputs(settings)
    assert [ROLLOUTS, ROLLOUTS // 2] == [len(found["rollouts"]), len(found["samples"])]
    return found


def _written(kafka: KafkaSettings, noun: str = "rollouts") -> int:
    return sum(ends(kafka, (noun,)).values())


def test_outputs_are_those_of_an_undisturbed_run_after_two_kills(
    shell_topics: KafkaSettings, worker: Make, undisturbed: dict[str, Any]
) -> None:
    """SIGKILL after a commit that leaves rollouts half committed, and SIGKILL before one, with all to be read again."""
    process = worker(shell_topics.prefix, "w")
    process.start()
    write(shell_topics, PARTS[0])
    process.wait_until(
        lambda: any(noun == "groups" for noun, _ in committed_by_group(shell_topics)), 60, "something is committed"
    )
    process.kill()
    process.start()
    write(shell_topics, PARTS[1])
    before = _written(shell_topics)
    process.wait_until(lambda: _written(shell_topics) > before, 60, "something more is written")
    process.kill()
    process.start()
    write(shell_topics, PARTS[2])

    process.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert undisturbed == outputs(shell_topics)


def test_outputs_are_those_of_an_undisturbed_run_when_workers_come_and_freeze(
    shell_topics: KafkaSettings, worker: Make, undisturbed: dict[str, Any]
) -> None:
    """A second worker takes over, the first freezes beyond its session, comes back as a zombie, and is left alone."""
    first, second = worker(shell_topics.prefix, "w1"), worker(shell_topics.prefix, "w2")
    first.start()
    write(shell_topics, PARTS[0])
    first.wait_until(lambda: _written(shell_topics) > 0, 60, "something is written")
    second.start()
    write(shell_topics, PARTS[1])
    first.pause()
    second.wait_until(lambda: "Worker ready" in second.log_text(), 60, "it has partitions")
    before = _written(shell_topics)
    write(shell_topics, PARTS[2])
    second.wait_until(lambda: _written(shell_topics) > before, 60, "it works alone")
    first.resume()
    first.wait_until(lambda: first.log_text().count("Worker ready") > 1, 60, "it is back in the group")
    second.kill()

    first.wait_until(lambda: is_done(shell_topics), 90, "everything is committed")

    assert undisturbed == outputs(shell_topics)


def test_worker_ends_cleanly_on_sigterm(shell_topics: KafkaSettings, worker: Make) -> None:
    """Exit status 0, and all inputs that were finished are committed on the way out."""
    write(shell_topics, rollouts(0, 300))
    process = worker(shell_topics.prefix, "w")
    process.start()
    process.wait_until(lambda: _written(shell_topics, "samples") == 150, 60, "all is out")

    process.stop()

    assert process.returncode == 0
    assert ends(shell_topics, ("calls",)) == {
        at: offset for at, offset in committed_by_group(shell_topics).items() if at[0] == "calls"
    }


def test_undecodable_bytes_reach_the_dead_letters_and_are_committed(
    shell_topics: KafkaSettings, worker: Make
) -> None:
    """The worker lives, the bytes are kept with their place, the rest goes on."""
    write(shell_topics, rollouts(0, 100))
    writer = Writer(shell_topics)
    writer.write_bytes("calls", b"\xc3\x01nonsense", 1)
    writer.flush()

    with worker(shell_topics.prefix, "w") as process:
        process.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    [(_, _, value, headers)] = read(shell_topics, "dead-letters")
    assert b"\xc3\x01nonsense" in value
    assert headers["ce_source"] == b"/decode"


def test_worker_stops_over_topics_with_different_partition_counts(kafka: KafkaBroker, worker: Make) -> None:
    """Same-numbered partitions would not hold the same groups, so nothing is processed."""
    prefix = f"t{uuid.uuid4().hex[:8]}"
    nouns = ("calls", "environment", "terminals", *OUTPUTS)
    new = [NewTopic(f"{prefix}.{noun}.v1", 2 if noun == "calls" else 3, 1) for noun in nouns]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in admin.create_topics(new).values():
        future.result(30)
    process = worker(prefix, "w")

    process.start()

    assert process.wait_exit(60) == 1
    assert "cannot process: the topics' partitions differ" in process.log_text()
