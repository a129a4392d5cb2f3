"""What the shell's integration tests share: topics of a test alone, worker processes, what they have written and committed."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from rollstream.process import ServiceProcess
from rollstream.schemas.records import Record
from rollstream.settings import KafkaSettings
from tests.integration.shell_log import Writer, committed, ends, kafka_settings, make_topics, read
from tests.integration.shell_worker import NAMES
from tests.services.kafka import KafkaBroker

OUTPUTS = ("rollouts", "groups", "scores", "rewards", "credits", "samples")

Make = Callable[..., ServiceProcess]
"""Makes a worker, not started, of prefix, instance, variant and `session_ms`."""


@pytest.fixture
def shell_topics(kafka: KafkaBroker) -> KafkaSettings:
    """Topics of this test alone."""
    made = kafka_settings(kafka.bootstrap, f"t{uuid.uuid4().hex[:8]}")
    make_topics(made)
    return made


@pytest.fixture
def worker(kafka: KafkaBroker, tmp_path: Path) -> Iterator[Make]:
    """Makes workers; ends them."""
    made: list[ServiceProcess] = []

    def make(prefix: str, instance: str, variant: str = "", **options: int) -> ServiceProcess:
        log_file = tmp_path / f"{len(made)}-{instance}.log"
        made.append(new_worker(kafka, log_file, prefix, instance, variant, **options))
        return made[-1]

    yield make
    for process in made:
        process.kill()


def new_worker(
    kafka: KafkaBroker, log_file: Path, prefix: str, instance: str, variant: str = "", *, session_ms: int = 6_000
) -> ServiceProcess:
    """A worker, not started."""
    module = "tests.integration.shell_worker"
    command = [sys.executable, "-m", module, kafka.bootstrap, prefix, instance, variant, str(session_ms)]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return ServiceProcess(f"worker {instance}", command, log_file=log_file, env=env)


def committed_by_group(kafka: KafkaSettings) -> dict[tuple[str, int], int]:
    """(noun, partition) → what the workers have committed."""
    return committed(kafka, f"{kafka.prefix}.processor.{'-'.join(NAMES)}")


def is_done(kafka: KafkaSettings) -> bool:
    """Whether everything is committed to the end."""
    return committed_by_group(kafka) == ends(kafka)


def write(kafka: KafkaSettings, records: Iterable[tuple[str, Record]]) -> None:
    """Append records, and wait until they are there."""
    writer = Writer(kafka)
    for noun, record in records:
        writer.write(noun, record)
    writer.flush()


def outputs(kafka: KafkaSettings) -> dict[str, list[tuple[bytes, bytes]]]:
    """Topic noun → distinct (key, value), sorted; two values for one item would show as one too many."""
    return {noun: sorted({(key, value) for _, key, value, _ in read(kafka, noun)}) for noun in OUTPUTS}
