"""One vLLM for all end-to-end tests, as each of them expects it: alive, with the tiny model's own weights as version 0."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.vllm import VllmServer


@pytest.fixture(scope="session")
def started_vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM with the tiny model and the routes that change weights."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    shutil.copytree(tiny_model, folder)
    with VllmServer(folder, "policy", dev_mode=True, tool_parser="hermes") as server:
        yield server


@pytest.fixture
def vllm(started_vllm: VllmServer) -> VllmServer:
    """The same one, started again if an earlier test killed it. A test that loads other weights loads version 0 again."""
    if not started_vllm.is_healthy():
        started_vllm.restart()
    return started_vllm
