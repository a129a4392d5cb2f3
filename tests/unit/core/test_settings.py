"""Settings: defaults that run, and errors that say what to write instead."""

from __future__ import annotations

import pytest

from rollstream.errors import SettingsError
from rollstream.kafka import client_properties, producer_properties
from rollstream.settings import KafkaSettings, load_settings, setting_names
from rollstream.sinks.run import consumer_properties


def test_defaults_need_no_file_and_no_environment() -> None:
    """Everything has a default."""
    settings = load_settings(environ={})

    assert settings.kafka.prefix == "rollstream"
    assert settings.processor.stages[0] == "join"


def test_environment_wins_over_the_file(tmp_path) -> None:
    """A value of the environment replaces the file's, field by field."""
    file = tmp_path / "settings.yaml"
    file.write_text("kafka: {bootstrap: 'a:1', partitions: 3}\n")

    settings = load_settings(file, {"ROLLSTREAM_KAFKA__BOOTSTRAP": "b:2"})

    assert (settings.kafka.bootstrap, settings.kafka.partitions) == ("b:2", 3)


def test_lists_and_mappings_are_read_from_the_environment() -> None:
    """Flow-style YAML gives lists and mappings; everything else stays text."""
    settings = load_settings(
        environ={
            "ROLLSTREAM_PROCESSOR__STAGES": "[join, group]",
            "ROLLSTREAM_KAFKA__PROPERTIES": '{"security.protocol": "SSL"}',
            "ROLLSTREAM_GATEWAY__KEY_SECRET": "123",
        }
    )

    assert settings.processor.stages == ("join", "group")
    assert settings.kafka.properties == {"security.protocol": "SSL"}
    assert settings.gateway.key_secret == "123"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ROLLSTREAM_KAFKA__BOOTSTRP", "unknown setting 'kafka.bootstrp', nearest is 'kafka.bootstrap'"),
        ("ROLLSTREAM_GATEWY__PORT", "unknown setting 'gatewy', nearest is 'gateway'"),
        ("ROLLSTREAM_KAFKA__PARTITIONS", "setting kafka.partitions"),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_write_instead(name: str, message: str) -> None:
    """An unknown name tells the nearest known one; a wrong value tells the setting."""
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={name: "x"})

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ROLLSTREAM_PROCESSOR__STAGES": "[join"}, "ROLLSTREAM_PROCESSOR__STAGES='[join'"),
        ({"ROLLSTREAM_KAFKA": "x", "ROLLSTREAM_KAFKA__PREFIX": "y"}, "setting kafka: expected a mapping, got 'x'"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(environ: dict[str, str], message: str) -> None:
    """Broken YAML, or a value where a part of the settings stands, is our error and no traceback."""
    with pytest.raises(SettingsError) as caught:
        load_settings(environ=environ)

    assert message in str(caught.value)


def test_a_settings_file_that_is_no_mapping_is_refused(tmp_path) -> None:
    """A file with a list in it is named."""
    file = tmp_path / "settings.yaml"
    file.write_text("- a\n")

    with pytest.raises(SettingsError, match="expected a mapping"):
        load_settings(file, {})


def test_every_setting_has_a_variable() -> None:
    """The list of variables covers each part."""
    names = set(setting_names())

    assert {"ROLLSTREAM_KAFKA__BOOTSTRAP", "ROLLSTREAM_GATEWAY__PORT", "ROLLSTREAM_SINK__CLICKHOUSE"} <= names


def test_consumers_are_not_told_what_only_producers_understand() -> None:
    """A setting about idempotence reaches producers alone; security reaches all."""
    kafka = KafkaSettings(properties={"enable.idempotence": "false", "security.protocol": "SSL"})

    assert "enable.idempotence" not in client_properties(kafka)
    assert producer_properties(kafka)["enable.idempotence"] == "false"
    assert producer_properties(KafkaSettings())["enable.idempotence"] is True
    assert client_properties(kafka)["security.protocol"] == "SSL"


def test_batching_reaches_those_who_can_use_it() -> None:
    """How long to wait for company is the producers' affair, how much to ask for at once that of sinks."""
    kafka = KafkaSettings(properties={"linger.ms": "100", "fetch.min.bytes": "5"})

    assert not {"linger.ms", "fetch.min.bytes"} & set(client_properties(kafka))
    assert producer_properties(kafka, linger_ms=2)["linger.ms"] == "100"
    assert "fetch.min.bytes" not in producer_properties(kafka)
    assert consumer_properties(kafka, "objects")["fetch.min.bytes"] == "5"
    assert "linger.ms" not in consumer_properties(kafka, "objects")
