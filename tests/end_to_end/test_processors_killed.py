"""Processors killed in the middle leave no trace in the samples."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from rollstream.kafka import client_properties
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.end_to_end.processes import our_process
from tests.end_to_end.source_run import SourceRun, wait_for
from tests.end_to_end.topic_reader import is_readable
from tests.source_log import source_log

GROUPS = 300
DERIVED = ("rollouts", "groups", "scores", "rewards", "credits", "samples", "dead-letters")


@pytest.mark.timeout(300)
def test_samples_are_the_same_bytes_when_processors_are_killed(kafka_settings: KafkaSettings, tmp_path: Path) -> None:
    """Two SIGKILLs in the middle of a source log give, record for record, the samples of an undisturbed run over it."""
    log = source_log(GROUPS, 4, seed=7, start_ms=time.time_ns() // 1_000_000)
    run = SourceRun(kafka_settings)
    run.write(log[: len(log) // 2])

    with our_process("processor", ["processor"], tmp_path, kafka_settings) as processor:
        run.wait_built(GROUPS // 10)
        processor.kill()
        processor.start()
        run.write(log[len(log) // 2 :])
        run.wait_built(run.built() + GROUPS // 10)
        processor.kill()
        processor.start()
        run.wait_built(GROUPS)
        run.wait_committed()
    disturbed = run.samples()
    _forget_derived(run)
    with our_process("undisturbed", ["processor"], tmp_path, kafka_settings):
        run.wait_built(GROUPS)
    undisturbed = run.samples()

    assert disturbed == undisturbed
    assert len(undisturbed) > GROUPS
    assert run.dead_letters() == []


def _forget_derived(run: SourceRun) -> None:
    """Delete everything the processors wrote, their positions too; the source topics stay."""
    admin = AdminClient(client_properties(run.kafka))
    names = [topics()[noun].name(run.kafka.prefix) for noun in DERIVED]
    for future in admin.delete_topics(names).values():
        future.result()
    wait_for(lambda: _group_is_deleted(admin, run.group), "the consumer group is deleted")
    wait_for(lambda: not set(names) & set(admin.list_topics(timeout=10).topics), "the topics are gone")
    apply_topics(run.kafka)
    wait_for(lambda: all(is_readable(run.kafka, noun) for noun in DERIVED), "the topics can be read")


def _group_is_deleted(admin: AdminClient, group: str) -> bool:
    """Try to delete the group; a static member stays in it until its session ends."""
    try:
        admin.delete_consumer_groups([group])[group].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.NON_EMPTY_GROUP:
            return False
        raise
    return True
