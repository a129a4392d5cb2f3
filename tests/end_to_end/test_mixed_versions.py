"""Producers of different versions and framings in one run, through the real processors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollstream.schemas.codec import Codec, schema_files
from rollstream.schemas.records import EnvironmentEvent, Record
from rollstream.schemas.registry import ConfluentRegistry, open_codec
from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.end_to_end.processes import our_process
from tests.end_to_end.source_run import SourceRun
from tests.services.registry import SchemaRegistry
from tests.source_log import source_log
from tests.unit.schemas.next_versions import adds_a_field_in_front, body_of, next_schema

GROUPS = 30
WAIT_S = 120.0


@pytest.mark.timeout(900)
def test_producers_of_all_versions_and_framings_build_the_groups_of_one(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    """Single-object encoding, a registry's ids, and events of a version that only the registry knows, interleaved within every
    rollout: what is built is, byte for byte, what one producer gives.
    """
    log = source_log(GROUPS, 3, seed=11, start_ms=time.time_ns() // 1_000_000)
    alone = kafka_settings.model_copy(update={"prefix": f"{kafka_settings.prefix}-one"})
    apply_topics(alone)
    with SchemaRegistry(tmp_path / "registry") as registry:
        client = ConfluentRegistry(registry.url)
        for schema in schema_files().values():
            client.register(schema)
        newer = next_schema("environment_event", adds_a_field_in_front)
        newer_id = registry.register("rollstream.EnvironmentEvent", newer.text)
        codecs = [Codec(), open_codec(registry.url, None)]

        def mixed(index: int, record: Record) -> bytes:
            if isinstance(record, EnvironmentEvent) and index % 3 == 0:
                return b"\x00" + newer_id.to_bytes(4, "big") + body_of(record, newer)
            return codecs[index % 2].encode(record)

        runs = [SourceRun(kafka, codecs[1]) for kafka in (kafka_settings, alone)]
        runs[0].write(log, mixed)
        runs[1].write(log, lambda _, record: codecs[1].encode(record))
        for run in runs:
            _build(run, tmp_path, registry)
        found, letters = [run.samples() for run in runs], [run.dead_letters() for run in runs]

    assert found[0] == found[1]
    assert GROUPS < len(found[0])
    assert [[], []] == letters


def _build(run: SourceRun, folder: Path, registry: SchemaRegistry) -> None:
    """Run the processors until all groups are built."""
    with our_process(
        run.kafka.prefix, ["processor"], folder, run.kafka, KAFKA__REGISTRY_URL=registry.url
    ) as processor:
        processor.wait_until(lambda: run.built() == GROUPS, WAIT_S, "all groups are built")
