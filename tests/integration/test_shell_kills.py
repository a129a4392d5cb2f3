"""The shell on Apache Kafka: what SIGKILL, a frozen worker and a second worker do to the outputs. They do nothing.

Every run is compared with an undisturbed run over the same input: the same values, byte for byte, once doubled messages
are taken out; and every offset committed in the end.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from rollstream.process import ServiceProcess
from rollstream.schemas.records import Record
from rollstream.settings import KafkaSettings
from tests.integration.shell_log import Writer, committed, ends, kafka_settings, make_topics, read, rollouts
from tests.integration.shell_worker import NAMES
from tests.services.kafka import KafkaBroker

OUTPUTS = ("rollouts", "groups", "scores", "rewards", "credits", "samples")
ROLLOUTS = 1_800
RECORDS = list(rollouts(0, ROLLOUTS))
PARTS = [RECORDS[part * len(RECORDS) // 3 : (part + 1) * len(RECORDS) // 3] for part in range(3)]
"""The input in three parts; some forty rollouts are open where one part ends."""

Make = Callable[[str, str], ServiceProcess]

pytestmark = pytest.mark.kafka


@pytest.fixture
def settings(kafka: KafkaBroker) -> KafkaSettings:
    """Topics of this test alone."""
    made = kafka_settings(kafka.bootstrap, f"t{uuid.uuid4().hex[:8]}")
    make_topics(made)
    return made


@pytest.fixture
def worker(kafka: KafkaBroker, tmp_path: Path) -> Iterator[Make]:
    """Makes workers, not started; ends them."""
    made: list[ServiceProcess] = []

    def make(prefix: str, instance: str) -> ServiceProcess:
        made.append(_worker(kafka, tmp_path, prefix, instance))
        return made[-1]

    yield make
    for process in made:
        process.kill()


@pytest.fixture(scope="module")
def undisturbed(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[bytes, bytes]]]:
    """What an undisturbed run writes."""
    settings = kafka_settings(kafka.bootstrap, f"calm{uuid.uuid4().hex[:8]}")
    make_topics(settings)
    _write(settings, RECORDS)
    with _worker(kafka, tmp_path_factory.mktemp("calm"), settings.prefix, "calm") as process:
        process.wait_until(lambda: _is_done(settings), 60, "everything is committed")
    found = _outputs(settings)
    assert [ROLLOUTS, ROLLOUTS // 2] == [len(found["rollouts"]), len(found["samples"])]
    return found


def _worker(kafka: KafkaBroker, folder: Path, prefix: str, instance: str) -> ServiceProcess:
    command = [sys.executable, "-m", "tests.integration.shell_worker", kafka.bootstrap, prefix, instance]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return ServiceProcess(f"worker {instance}", command, log_file=folder / f"{instance}.log", env=env)


def _committed(kafka: KafkaSettings) -> dict[tuple[str, int], int]:
    return committed(kafka, f"{kafka.prefix}.processor.{'-'.join(NAMES)}")


def _is_done(kafka: KafkaSettings) -> bool:
    return _committed(kafka) == ends(kafka)


def _write(kafka: KafkaSettings, records: Iterable[tuple[str, Record]]) -> None:
    writer = Writer(kafka)
    for noun, record in records:
        writer.write(noun, record)
    writer.flush()


def _written(kafka: KafkaSettings, noun: str = "rollouts") -> int:
    return sum(ends(kafka, (noun,)).values())


def _outputs(kafka: KafkaSettings) -> dict[str, list[tuple[bytes, bytes]]]:
    """Topic noun → distinct (key, value), sorted; two values for one item would show as one too many."""
    return {noun: sorted({(key, value) for _, key, value, _ in read(kafka, noun)}) for noun in OUTPUTS}


def test_outputs_are_those_of_an_undisturbed_run_after_two_kills(
    settings: KafkaSettings, worker: Make, undisturbed: dict[str, Any]
) -> None:
    """SIGKILL after a commit that leaves rollouts half committed, and SIGKILL before one, with all to be read again."""
    process = worker(settings.prefix, "w")
    process.start()
    _write(settings, PARTS[0])
    process.wait_until(
        lambda: any(noun == "groups" for noun, _ in _committed(settings)), 60, "something is committed"
    )
    process.kill()
    process.start()
    _write(settings, PARTS[1])
    before = _written(settings)
    process.wait_until(lambda: _written(settings) > before, 60, "something more is written")
    process.kill()
    process.start()
    _write(settings, PARTS[2])

    process.wait_until(lambda: _is_done(settings), 60, "everything is committed")

    assert undisturbed == _outputs(settings)


def test_outputs_are_those_of_an_undisturbed_run_when_workers_come_and_freeze(
    settings: KafkaSettings, worker: Make, undisturbed: dict[str, Any]
) -> None:
    """A second worker takes over, the first freezes beyond its session, comes back as a zombie, and is left alone."""
    first, second = worker(settings.prefix, "w1"), worker(settings.prefix, "w2")
    first.start()
    _write(settings, PARTS[0])
    first.wait_until(lambda: _written(settings) > 0, 60, "something is written")
    second.start()
    _write(settings, PARTS[1])
    first.pause()
    second.wait_until(lambda: "Worker ready" in second.log_text(), 60, "it has partitions")
    before = _written(settings)
    _write(settings, PARTS[2])
    second.wait_until(lambda: _written(settings) > before, 60, "it works alone")
    first.resume()
    first.wait_until(lambda: first.log_text().count("Worker ready") > 1, 60, "it is back in the group")
    second.kill()

    first.wait_until(lambda: _is_done(settings), 90, "everything is committed")

    assert undisturbed == _outputs(settings)


def test_worker_ends_cleanly_on_sigterm(settings: KafkaSettings, worker: Make) -> None:
    """Exit status 0, and all inputs that were finished are committed on the way out."""
    _write(settings, rollouts(0, 300))
    process = worker(settings.prefix, "w")
    process.start()
    process.wait_until(lambda: _written(settings, "samples") == 150, 60, "all is out")

    process.stop()

    assert process.returncode == 0
    assert ends(settings, ("calls",)) == {
        at: offset for at, offset in _committed(settings).items() if at[0] == "calls"
    }


def test_undecodable_bytes_reach_the_dead_letters_and_are_committed(settings: KafkaSettings, worker: Make) -> None:
    """The worker lives, the bytes are kept with their place, the rest goes on."""
    _write(settings, rollouts(0, 100))
    writer = Writer(settings)
    writer.write_bytes("calls", b"\xc3\x01nonsense", 1)
    writer.flush()

    with worker(settings.prefix, "w") as process:
        process.wait_until(lambda: _is_done(settings), 60, "everything is committed")

    [(_, _, value, headers)] = read(settings, "dead-letters")
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
