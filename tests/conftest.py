"""What several test folders share. A service that cannot be started is a failure, never a skip."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling, Scheduling

from rollstream.settings import KafkaSettings
from rollstream.topic_admin import apply_topics
from tests.services.kafka import KafkaBroker

FOLDERS = ("end_to_end", "integration", "contract", "generated", "unit")
"""In the order in which several processes take them: what takes long comes first, and small tests fill the gaps at the end.
Others come before these."""


WITH_MODEL = ("test_vllm_call.py", "test_vllm_line.py", "test_gateway_kafka.py")
"""Files that share the tiny model, and the vLLM that serves it."""


class _ByFile(LoadFileScheduling):
    """The tests of a file run in one process, for they share what their fixtures start; so do the files with a model."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "with a model" if file.endswith(WITH_MODEL) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """How tests are dealt to processes."""
    return _ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by folder where there are several processes; within a folder the order stays as it is, by chance."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.path.relative_to(Path(__file__).parent).parts[0]))


def _place(folder: str) -> int:
    return FOLDERS.index(folder) if folder in FOLDERS else -1


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One Apache Kafka broker for all tests of a process; tests use topic prefixes of their own."""
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
