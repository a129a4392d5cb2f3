"""What several test folders share. A service that cannot be started is a failure, never a skip."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.services.kafka import KafkaBroker


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One Apache Kafka broker for the whole run; tests use topic prefixes of their own."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def kafka_settings(kafka: KafkaBroker) -> KafkaSettings:
    """Settings with a fresh topic prefix and all topics made."""
    settings = KafkaSettings(
        bootstrap=kafka.bootstrap, prefix=f"t{uuid.uuid4().hex[:8]}", partitions=3, session_timeout_ms=6_000
    )
    apply_topics(settings)
    return settings


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2 model and its tokenizer."""
    from tests.services.tiny_qwen import make_tiny_qwen

    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_qwen(folder)
    return folder
