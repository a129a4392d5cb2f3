"""Records too large for Kafka, with Apache Kafka, the real processors, sinks and the trainer's reader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import Producer

from rollstream.kafka import producer_properties
from rollstream.object_store import open_store
from rollstream.process import ServiceProcess
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    CallStarted,
    DeadLetter,
    GroupBuilt,
    ModelCall,
    Record,
    Rollout,
    RolloutOpened,
    RolloutStatus,
    Sample,
    Terminal,
)
from rollstream.schemas.registry import open_codec
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json, unpack_ids
from rollstream.settings import MAX_RECORD_BYTES, ClaimSettings, KafkaSettings
from rollstream.sinks.objects import read_records
from rollstream.topic_admin import apply_topics
from rollstream.trainers import SampleReader
from tests.end_to_end.processes import our_process
from tests.end_to_end.topic_reader import read_topic
from tests.services.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from tests.source_log import Entry
from tests.unit.schemas.calls import a_call

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]
WAIT_S = 240.0
SMALL_LIMIT = 1_024


def a_rollout(rollout_id: str, group_id: str, calls: int, tokens: int, *, reward: float = 1.0) -> list[Entry]:
    """A rollout of a group of two whose calls sample `tokens` tokens each, and each continues the one before."""
    now_ms = time.time_ns() // 1_000_000
    log: list[Entry] = [("calls", RolloutOpened(rollout_id, 0, group_id, 2, "task", now_ms, Json("{}")))]
    known: dict[str, np.ndarray] = {}
    conversation = np.arange(8, dtype=np.uint32)
    for index in range(calls):
        prompt = encode_prompt(conversation, known)
        call = a_call(
            f"{rollout_id}.c-{index}",
            prompt=prompt,
            output=range(index, index + tokens),
            rollout_id=rollout_id,
            group_id=group_id,
            call_index=index,
        )
        call = replace(call, started_at_ms=now_ms, finished_at_ms=now_ms)
        started = CallStarted(
            call.call_id, rollout_id, 0, group_id, index, prompt.length, prompt.digest, call.request_digest, now_ms
        )
        log += [("calls", started), ("calls", call)]
        conversation = np.concatenate([conversation, unpack_ids(call.output_ids), np.array([7, 8], np.uint32)])
        known = {call.call_id: conversation[:-2]}
    outcome = Json(json.dumps({"reward": reward}))
    terminal = Terminal(
        rollout_id, 0, group_id, 2, "task", RolloutStatus.SUCCEEDED, now_ms, outcome, expected_calls=calls
    )
    return [*log, *((noun, terminal) for noun in TERMINAL_TOPICS)]


def a_group(group_id: str, calls: int, tokens: int) -> list[Entry]:
    """Two rollouts, one of them small and without success."""
    name = group_id.replace("g", "r", 1)
    return [*a_rollout(name, group_id, calls, tokens), *a_rollout(f"{name}-b", group_id, 1, 5, reward=0.0)]


def write(kafka: KafkaSettings, log: list[Entry], codec: Codec) -> None:
    producer = Producer(producer_properties(kafka))
    failed: list[object] = []
    for noun, record in log:
        message = to_message(record, codec, prefix=kafka.prefix, source="/test", noun=noun)
        producer.produce(
            message.topic,
            message.value,
            message.key,
            timestamp=message.timestamp_ms,
            headers=list(message.headers),
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
        producer.poll(0)
    assert (0, []) == (producer.flush(60), failed)


def environment(claims: ClaimSettings) -> dict[str, str]:
    return {
        "CLAIMS__STORE": claims.store,
        "CLAIMS__INLINE_BYTES": str(claims.inline_bytes),
        "CLAIMS__S3": json.dumps(claims.s3),
    }


def records(kafka: KafkaSettings, noun: str, codec: Codec) -> list[Record]:
    return [codec.decode(value) for _, value in read_topic(kafka, noun)]


def built(kafka: KafkaSettings, codec: Codec) -> set[str]:
    return {record.group_id for record in records(kafka, "samples", codec) if isinstance(record, GroupBuilt)}


def wait(process: ServiceProcess, condition: Callable[[], bool], what: str) -> None:
    process.wait_until(condition, WAIT_S, what)


def test_rollout_larger_than_kafka_takes_reaches_trainer_and_store(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    """100 calls with more bytes than a topic's largest record: rollout and sample go by claim, and arrive token for token."""
    claims = ClaimSettings(store=str(tmp_path / "claims"))
    codec = open_codec(None, claims)
    log = a_group("g-large", 100, 12_000)
    write(kafka_settings, log, codec)
    objects = str(tmp_path / "objects")

    with our_process("processor", ["processor"], tmp_path, kafka_settings, **environment(claims)) as processor:
        wait(processor, lambda: built(kafka_settings, codec) == {"g-large"}, "the group is built")
    more = {"SINK__OBJECTS": objects, "SINK__OBJECTS_MAX_AGE_S": "0.3"}
    with our_process("sink", ["sink", "objects"], tmp_path, kafka_settings, **environment(claims), **more) as sink:
        wait(sink, lambda: bool(list(read_records(open_store(objects), GroupBuilt))), "the group is stored")
    with SampleReader(kafka_settings, trainer="t", claims=claims) as reader:
        (group,) = reader.next_groups(1, WAIT_S)

    rollouts = {r.rollout_id: r for r in records(kafka_settings, "rollouts", codec) if isinstance(r, Rollout)}
    large = rollouts["r-large"]
    assert len(codec.frame(large)) > MAX_RECORD_BYTES
    calls = [record for _, record in log if isinstance(record, ModelCall)]
    assert [call for call in calls if call.rollout_id == "r-large"] == list(large.calls)
    assert 100 * 12_000 + 5 == sum(sample.sampled_tokens for sample in group.samples)
    assert tuple(read_records(open_store(objects), Sample)) == tuple(group.samples)
    assert [] == list(read_topic(kafka_settings, "dead-letters"))
    assert (
        max(len(value) for noun in ("rollouts", "samples") for _, value in read_topic(kafka_settings, noun)) < 10_000
    )


def test_claim_that_is_gone_or_changed_stops_nobody_else(kafka_settings: KafkaSettings, tmp_path: Path) -> None:
    """Its call becomes a dead letter with the reason, and what stands behind it in the partition is built."""
    kafka_settings = kafka_settings.model_copy(update={"prefix": f"{kafka_settings.prefix}-one", "partitions": 1})
    apply_topics(kafka_settings)
    claims = ClaimSettings(store=str(tmp_path / "claims"), inline_bytes=SMALL_LIMIT)
    codec = open_codec(None, claims)
    for name in ("gone", "changed"):
        log = a_rollout(f"r-{name}", f"g-{name}", 1, 500)
        write(kafka_settings, [entry for entry in log if entry[0] == "calls"], codec)
    gone, changed = (file for file in sorted((tmp_path / "claims").rglob("*/*")) if file.is_file())
    gone.unlink()
    changed.write_bytes(changed.read_bytes()[:-1] + b"\xff")
    write(kafka_settings, a_group("g-good", 2, 500), codec)

    with our_process("processor", ["processor"], tmp_path, kafka_settings, **environment(claims)) as processor:
        wait(processor, lambda: "g-good" in built(kafka_settings, codec), "the other group is built")
        wait(
            processor,
            lambda: {"claim_missing", "claim_mismatch"} <= reasons(kafka_settings, codec),
            "both claims are dead letters",
        )


def reasons(kafka: KafkaSettings, codec: Codec) -> set[str]:
    found = records(kafka, "dead-letters", codec)
    assert all(isinstance(record, DeadLetter) for record in found)
    return {record.reason for record in found}  # type: ignore[union-attr]


def test_store_that_is_down_stops_the_process_and_loses_nothing(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    """A processor ends while the bucket is away; with it, every group is built once, and redelivery makes no second claim."""
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("rollstream")
        options = {
            "endpoint": server.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }
        claims = ClaimSettings(store="s3://rollstream/here", inline_bytes=SMALL_LIMIT, s3=options)
        codec = open_codec(None, claims)
        groups = {f"g-{n}" for n in range(6)}
        for group_id in sorted(groups):
            write(kafka_settings, a_group(group_id, 2, 500), codec)
        server.kill()

        with our_process("processor", ["processor"], tmp_path, kafka_settings, **environment(claims)) as processor:
            status, told = processor.wait_exit(WAIT_S), processor.log_text()
            server.start()
            processor.start()
            wait(processor, lambda: bool(built(kafka_settings, codec)), "the first group is built")
            processor.kill()
            processor.start()
            wait(processor, lambda: built(kafka_settings, codec) == groups, "all groups are built")

        assert 0 != status
        assert "see claims.store and claims.s3" in told
        assert [] == list(read_topic(kafka_settings, "dead-letters"))
        values = {value for noun in ("calls", "rollouts", "samples") for _, value in read_topic(kafka_settings, noun)}
        checks = {check.digest for check in map(codec.claim_check, values) if check is not None}
        stored = [
            file.name for file in (server.folder / "buckets" / "rollstream" / "here").rglob("*") if file.is_file()
        ]
        assert checks == set(stored)
        assert len(checks) == len(stored)
