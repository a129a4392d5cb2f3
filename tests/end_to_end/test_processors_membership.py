"""Workers that are killed, come, go, freeze or lose their broker in the middle of a log leave no trace in the samples.

All tests run the same source log, each under a topic prefix of its own, and compare with one undisturbed run over it: what a
processor writes depends on the records alone, so the bytes must be equal.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from rollstream.kafka import client_properties
from rollstream.process import ServiceProcess
from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.end_to_end.processes import our_process
from tests.end_to_end.source_run import Samples, SourceRun, wait_for
from tests.services.kafka import KafkaBroker
from tests.source_log import Entry, source_log

GROUPS = 240
PARTITIONS = 6
SESSION_MS = 6_000

pytestmark = pytest.mark.timeout(300)


def _new_run(bootstrap: str) -> SourceRun:
    kafka = KafkaSettings(
        bootstrap=bootstrap,
        prefix=f"m{uuid.uuid4().hex[:8]}",
        partitions=PARTITIONS,
        session_timeout_ms=SESSION_MS,
    )
    apply_topics(kafka)
    return SourceRun(kafka)


def _worker(run: SourceRun, folder: Path, name: str) -> ServiceProcess:
    return our_process(name, ["processor"], folder, run.kafka, PROCESSOR__INSTANCE_ID=name)


def _parts(log: list[Entry], count: int) -> list[list[Entry]]:
    size = -(-len(log) // count)
    return [log[at : at + size] for at in range(0, len(log), size)]


def _owners(run: SourceRun) -> int:
    """How many members of the processors' group have partitions."""
    admin = AdminClient(client_properties(run.kafka))
    group = admin.describe_consumer_groups([run.group])[run.group].result()
    return sum(bool(member.assignment.topic_partitions) for member in group.members)


@pytest.fixture(scope="module")
def log() -> list[Entry]:
    """The source log."""
    return source_log(GROUPS, 4, seed=11, start_ms=time.time_ns() // 1_000_000)


@pytest.fixture(scope="module")
def undisturbed(kafka: KafkaBroker, log: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """What one worker that nobody disturbs makes of it."""
    run = _new_run(kafka.bootstrap)
    run.write(log)
    with _worker(run, tmp_path_factory.mktemp("undisturbed"), "alone"):
        run.wait_built(GROUPS)
    samples = run.samples()
    assert len(samples) > GROUPS
    return samples


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A broker that a test may stop."""
    with KafkaBroker(tmp_path / "kafka") as broker:
        yield broker


def test_worker_that_is_killed_twice(
    kafka: KafkaBroker, log: list[Entry], undisturbed: Samples, tmp_path: Path
) -> None:
    """Two SIGKILLs in the middle of its work give, record for record, the undisturbed samples."""
    run = _new_run(kafka.bootstrap)
    first, second = _parts(log, 2)
    run.write(first)
    with _worker(run, tmp_path, "w-0") as worker:
        run.wait_built(GROUPS // 10)
        worker.kill()
        worker.start()
        run.write(second)
        run.wait_built(run.built() + GROUPS // 10)
        worker.kill()
        worker.start()
        run.wait_built(GROUPS)
        run.wait_committed()
    assert run.samples() == undisturbed
    assert run.dead_letters() == []


def test_one_three_one_workers(kafka: KafkaBroker, log: list[Entry], undisturbed: Samples, tmp_path: Path) -> None:
    """One worker, then three, then one again, of which one is killed and one stopped, give the undisturbed samples."""
    run = _new_run(kafka.bootstrap)
    first, second, third, last = _parts(log, 4)
    with ExitStack() as workers:
        workers.enter_context(_worker(run, tmp_path, "w-0"))
        run.write(first)
        run.wait_built(GROUPS // 20)
        joined = [workers.enter_context(_worker(run, tmp_path, f"w-{number}")) for number in (1, 2)]
        run.write(second)
        wait_for(lambda: _owners(run) == 3, "three workers have partitions")
        run.write(third)
        run.wait_built(run.built() + GROUPS // 20)
        joined[0].kill()
        joined[1].stop()
        run.write(last)
        run.wait_built(GROUPS)
        run.wait_committed()
        assert _owners(run) == 1
    assert run.samples() == undisturbed
    assert run.dead_letters() == []


def test_frozen_worker_that_wakes_up_corrupts_nothing(
    kafka: KafkaBroker, log: list[Entry], undisturbed: Samples, tmp_path: Path
) -> None:
    """A worker frozen in the middle of its work, whose partitions go to another one, wakes up and spoils nothing."""
    run = _new_run(kafka.bootstrap)
    first, second, third = _parts(log, 3)
    with _worker(run, tmp_path, "w-0") as zombie, _worker(run, tmp_path, "w-1") as other:
        wait_for(
            lambda: zombie.is_running() and other.is_running() and _owners(run) == 2, "two workers share the work"
        )
        run.write(first)
        run.wait_built(GROUPS // 20)
        zombie.pause()
        run.write(second)
        wait_for(lambda: _owners(run) == 1, "the other worker has all partitions")
        run.wait_built(run.built() + GROUPS // 20)
        zombie.resume()
        run.write(third)
        run.wait_built(GROUPS)
        run.wait_committed()
    assert run.samples() == undisturbed
    assert run.dead_letters() == []


def test_broker_that_is_away_for_a_while(
    own_broker: KafkaBroker, log: list[Entry], undisturbed: Samples, tmp_path: Path
) -> None:
    """A broker that freezes longer than the session changes no sample."""
    run = _new_run(own_broker.bootstrap)
    first, second = _parts(log, 2)
    with _worker(run, tmp_path, "w-0"):
        run.write(first)
        run.wait_built(GROUPS // 20)
        own_broker.pause()
        _wait_longer_than_a_session()
        own_broker.resume()
        run.wait_readable()
        run.write(second)
        run.wait_built(GROUPS)
        run.wait_committed()
    assert run.samples() == undisturbed
    assert run.dead_letters() == []


def test_broker_that_is_killed_and_stays_away(
    own_broker: KafkaBroker, log: list[Entry], undisturbed: Samples, tmp_path: Path
) -> None:
    """A broker killed twice, back at once and back after the session, changes no sample; the worker lives, and commits it all."""
    run = _new_run(own_broker.bootstrap)
    first, second, third = _parts(log, 3)
    with _worker(run, tmp_path, "w-0") as worker:
        run.write(first)
        run.wait_built(GROUPS // 20)
        own_broker.kill()
        own_broker.start()
        run.wait_readable()
        run.write(second)
        run.wait_built(run.built() + GROUPS // 20)
        own_broker.kill()
        _wait_longer_than_a_session()
        own_broker.start()
        run.wait_readable()
        run.write(third)
        run.wait_built(GROUPS)
        run.wait_committed()
        assert worker.is_running()
    assert run.samples() == undisturbed
    assert run.dead_letters() == []


def _wait_longer_than_a_session() -> None:
    begun_s = time.monotonic()
    wait_for(lambda: time.monotonic() - begun_s > 1.5 * SESSION_MS / 1000, "the session is over")
