"""`rollstream dlq` on Apache Kafka: dead letters found, shown and written back to where they came from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from click.testing import CliRunner, Result

from rollstream.cli import cli
from rollstream.dead_letter_topic import REDRIVEN_HEADER
from rollstream.schemas.codec import Codec
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import DeadLetter
from rollstream.settings import KafkaSettings
from tests.end_to_end.topic_reader import is_readable
from tests.integration.shell_log import Writer, read
from tests.unit.processors.shell.stages import opened

pytestmark = pytest.mark.kafka

CODEC = Codec()
POISON = b"\xff\xff poison"


@pytest.fixture
def letters(kafka_settings: KafkaSettings) -> list[DeadLetter]:
    """Three dead letters in the topic, the middle one twice, and one record that is none."""
    prefix = kafka_settings.prefix
    deadline_s = time.monotonic() + 60
    while not all(is_readable(kafka_settings, noun) for noun in ("calls", "environment", "dead-letters")):
        assert time.monotonic() < deadline_s, "the topics cannot be read"
    found = [
        _letter(f"{prefix}.calls.v1", 1, "join", "late", CODEC.encode(opened("r-1")), b"g"),
        _letter(f"{prefix}.environment.v1", 2, "decode", "unknown_framing", POISON, None),
        _letter(f"{prefix}.calls.v1", 0, "join", "late", CODEC.encode(opened("r-2")), b"g"),
    ]
    writer = Writer(kafka_settings)
    for letter in (found[0], found[1], found[1], found[2]):
        writer.write("dead-letters", letter)
    writer.write_bytes("dead-letters", b"\x00", 0)
    writer.flush()
    return found


def test_list_finds_what_the_filters_say(kafka_settings: KafkaSettings, letters: list[DeadLetter]) -> None:
    """Newest last, each once, with counts; what cannot be read is told."""
    everything = _dlq(kafka_settings, "list", "--json")
    late = _dlq(kafka_settings, "list", "--reason", "late", "--limit", "1")
    old = _dlq(kafka_settings, "list", "--since", "2001-01-01", "--topic", "environment", "--json")

    assert _ids(everything) == [letter.dead_letter_id for letter in letters]
    assert "1 records of the topic are no dead letters" in everything.stderr
    assert letters[2].dead_letter_id[:12] in late.stdout
    assert letters[0].dead_letter_id[:12] not in late.stdout
    assert "2  join: late" in late.stdout
    assert _ids(old) == [letters[1].dead_letter_id]


def test_show_opens_one_by_the_beginning_of_its_id(kafka_settings: KafkaSettings, letters: list[DeadLetter]) -> None:
    """The record where it can be read, else why not; an id that names none is an error."""
    readable = json.loads(_dlq(kafka_settings, "show", letters[0].dead_letter_id[:10], "--json").stdout)
    unreadable = _dlq(kafka_settings, "show", letters[1].dead_letter_id)
    unknown = _dlq(kafka_settings, "show", "zzz")

    assert readable["record"]["rollout_id"] == "r-1"
    assert "the bytes start with ffff" in unreadable.stdout
    assert POISON.hex(" ") in unreadable.stdout
    assert "there is no dead letter 'zzz'" in str(unknown.exception)


def test_redrive_writes_key_and_bytes_to_the_partition_they_came_from(
    kafka_settings: KafkaSettings, letters: list[DeadLetter]
) -> None:
    """With the id of the dead letter in a header, and only when told so."""
    dry = _dlq(kafka_settings, "redrive", "--reason", "late", "--dry-run")
    unsure = _dlq(kafka_settings, "redrive", "--reason", "late")
    before = read(kafka_settings, "calls")

    many = _dlq(kafka_settings, "redrive", "--reason", "late", "--yes")
    one = _dlq(kafka_settings, "redrive", letters[1].dead_letter_id)

    assert (dry.exit_code, unsure.exit_code, many.exit_code, one.exit_code) == (0, 2, 0, 0)
    assert "2 records would be written; say --yes" in unsure.stderr
    assert before == []
    assert read(kafka_settings, "calls") == [_expected(letters[2]), _expected(letters[0])]
    assert read(kafka_settings, "environment") == [_expected(letters[1])]
    assert f"{kafka_settings.prefix}.environment.v1 partition 2 as offset 0" in one.stdout


def test_redrive_refuses_when_the_settings_have_another_number_of_partitions(
    kafka_settings: KafkaSettings, letters: list[DeadLetter]
) -> None:
    """A group lives in one partition; nothing is written to a guess."""
    other = kafka_settings.model_copy(update={"partitions": 4})

    done = _dlq(other, "redrive", letters[0].dead_letter_id)

    assert done.exit_code == 2
    assert "has 3 partitions, and the settings say 4" in done.stderr
    assert read(kafka_settings, "calls") == []


def _letter(topic: str, partition: int, boundary: str, reason: str, value: bytes, key: bytes | None) -> DeadLetter:
    identity = digest_json([topic, partition, 7, boundary, reason])
    return DeadLetter(identity, boundary, reason, "why", topic, partition, 7, value, 1_000, key)


def _expected(letter: DeadLetter) -> tuple[int, bytes | None, bytes, dict[str, bytes]]:
    return letter.partition, letter.key, letter.value, {REDRIVEN_HEADER: letter.dead_letter_id.encode()}


def _ids(result: Result) -> list[str]:
    lines: Iterable[str] = result.stdout.splitlines()
    return [json.loads(line)["dead_letter_id"] for line in lines]


def _dlq(kafka: KafkaSettings, *arguments: str) -> Result:
    env = {
        "ROLLSTREAM_KAFKA__BOOTSTRAP": kafka.bootstrap,
        "ROLLSTREAM_KAFKA__PREFIX": kafka.prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(kafka.partitions),
    }
    return CliRunner(env=env).invoke(cli, ["dlq", *arguments])
