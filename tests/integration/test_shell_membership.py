"""Static membership on Apache Kafka: a restart within the session timeout moves nothing; one instance id is one process."""

from __future__ import annotations

import signal
from functools import cache

import pytest
from confluent_kafka.admin import AdminClient

from rollstream.process import ServiceProcess
from rollstream.settings import KafkaSettings
from tests.integration.shell_fixtures import Make, is_done, write
from tests.integration.shell_log import rollouts
from tests.integration.shell_worker import NAMES

pytestmark = pytest.mark.kafka

READY = "Worker ready"
LONG_SESSION_MS = 30_000
"""Longer than a restart takes, also on a machine that is busy."""


@cache
def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def _owned(kafka: KafkaSettings) -> dict[str, tuple[int, ...]]:
    """Instance → partition numbers of `calls` that the group gave it."""
    group = f"{kafka.prefix}.processor.{'-'.join(NAMES)}"
    told = _admin(kafka.bootstrap).describe_consumer_groups([group])[group].result(30)
    return {
        member.group_instance_id.rpartition(".")[2]: tuple(
            sorted(tp.partition for tp in member.assignment.topic_partitions if ".calls." in tp.topic)
        )
        for member in told.members
        if member.assignment and member.group_instance_id
    }


def _readies(process: ServiceProcess) -> int:
    return process.log_text().count(READY)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_restart_within_the_session_keeps_the_partitions(
    how: signal.Signals,
    shell_topics: KafkaSettings,
    worker: Make,
) -> None:
    """The other worker hears of nothing, and goes on with what it has."""
    first, second = (worker(shell_topics.prefix, name, session_ms=LONG_SESSION_MS) for name in ("w1", "w2"))
    first.start()
    second.start()
    for process in (first, second):
        process.wait_until(lambda log=process: READY in log.log_text(), 60, "it has joined")  # type: ignore[misc]
    first.wait_until(lambda: sorted(map(len, _owned(shell_topics).values())) == [1, 2], 60, "both own something")
    write(shell_topics, rollouts(0, 200))
    second.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")
    owned, assignments = _owned(shell_topics), _readies(second)

    first.kill() if how == signal.SIGKILL else first.stop()
    first.start()
    write(shell_topics, rollouts(200, 400))
    first.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert owned == _owned(shell_topics)
    assert assignments == _readies(second)


def test_second_process_of_an_instance_ends_the_first(
    shell_topics: KafkaSettings,
    worker: Make,
) -> None:
    """The older one stops and says why; the newer one works on undisturbed."""
    old, new = worker(shell_topics.prefix, "same"), worker(shell_topics.prefix, "same")
    old.start()
    write(shell_topics, rollouts(0, 200))
    old.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    new.start()
    code = old.wait_exit(60)
    write(shell_topics, rollouts(200, 400))
    new.wait_until(lambda: is_done(shell_topics), 60, "everything is committed")

    assert code == 1
    assert "another process has joined the group as instance" in old.log_text()
    assert "another process has joined" not in new.log_text()
