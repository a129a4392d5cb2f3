"""LoRA adapters as versions, over the scripted vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rollstream.errors import ProviderError
from rollstream.producers.engines.adapters import Adapter, adapter_spans, digest_adapter
from rollstream.producers.engines.base import Answer, LabelSpan
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.schemas.records import SamplingParams
from rollstream.settings import GatewaySettings
from tests.scripted.engine import ScriptedEngine

PROMPT = np.array([5, 6, 7], dtype=np.uint32)


@pytest.fixture
def server() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def engine(server: ScriptedEngine) -> AsyncIterator[VllmEngine]:
    async with server.served() as url:
        engine = VllmEngine(GatewaySettings(engine_url=url, engine_admin_url=url, engine_weights="adapter"))
        yield engine
        await engine.close()


async def ask(engine: VllmEngine) -> Answer:
    answer = Answer()
    await engine.start()
    await engine.generate(PROMPT, SamplingParams(1.0, 1.0, -1, 8, None), "call-1-0", answer)
    return answer


def weights(folder: Path, content: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


async def test_adapter_is_loaded_under_a_name_of_its_version_without_a_pause(
    engine: VllmEngine, server: ScriptedEngine, tmp_path: Path
) -> None:
    """Spans, version and identity are the adapter's, though the engine's label is that of the weights below."""
    path = weights(tmp_path / "a", "x")
    await engine.load_policy(7, path)

    answer = await ask(engine)

    control = [(where, body) for where, body in server.posted if "token" not in where and "derender" not in where]
    assert [("/v1/load_lora_adapter", {"lora_name": "policy-v7", "lora_path": path})] == control
    assert answer.finish is not None
    assert ({"7"}, 7) == ({span.label for span in answer.finish.spans}, engine.version)
    assert answer.served is not None
    assert ("policy-v7", digest_adapter(path)) == (answer.served.adapter, answer.served.adapter_digest)


async def test_name_is_never_given_to_other_weights(engine: VllmEngine, tmp_path: Path) -> None:
    """The same version with other files is refused, and the first goes on."""
    path = weights(tmp_path / "a", "x")
    await engine.load_policy(7, path)
    weights(tmp_path / "a", "y")

    with pytest.raises(ProviderError, match="a name is never given twice"):
        await engine.load_policy(7, path)

    assert ("policy-v7", 7) == (engine.identity().adapter, engine.version)


def test_weights_that_change_below_an_adapter_are_no_version() -> None:
    """One label below is the adapter's version; two are none."""
    adapter = Adapter("policy-v7", 7, "/a", "")

    same = adapter_spans(adapter, (LabelSpan(0, 2, "default"), LabelSpan(2, 3, "default")))
    changed = adapter_spans(adapter, (LabelSpan(0, 2, "3"), LabelSpan(2, 3, "4")))

    assert (LabelSpan(0, 2, "7"), LabelSpan(2, 3, "7")) == same
    assert (LabelSpan(0, 2, "policy-v7@3"), LabelSpan(2, 3, "policy-v7@4")) == changed


def test_digest_is_of_the_files(tmp_path: Path) -> None:
    """Equal files have one digest, other files another; a folder that cannot be read has none."""
    one, same, other = (
        digest_adapter(weights(tmp_path / name, text)) for name, text in (("a", "x"), ("b", "x"), ("c", "y"))
    )

    assert (one, "") == (same, digest_adapter(str(tmp_path / "none")))
    assert one != other
