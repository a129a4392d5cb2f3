"""Model calls through the gateway on a real vLLM: what is recorded is what vLLM was given and gave."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import LogprobSemantics, ModelCall, Outcome, SamplingParams, VersionSpan
from rollstream.schemas.types import unpack_floats, unpack_ids
from rollstream.settings import GatewaySettings
from tests.services.vllm import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TALK = Conversation([{"role": "user", "content": "What is 2 + 2?"}])


@pytest.fixture
async def engine(vllm: VllmServer) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(GatewaySettings(engine_url=vllm.base_url, engine_admin_url=vllm.base_url))
    await engine.start()
    yield engine
    await engine.close()


def rescored(folder: Path, prompt: np.ndarray, output: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of an answer by one plain forward pass of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([*prompt.tolist(), *output.tolist()])
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, torch.tensor(output.astype(np.int64))[:, None])[:, 0].numpy()


async def test_recorded_call_is_what_vllm_sampled(vllm: VllmServer, tmp_path: Path) -> None:
    """A conversation of plain and streamed calls: trainable records, whole prompts, log-probabilities that hold up."""
    publisher = MemoryPublisher()
    settings = GatewaySettings(
        engine_url=vllm.base_url,
        key_secret="s",
        spool_dir=tmp_path / "spool",
        max_output_tokens=12,
        temperature=0.7,
    )
    gateway = Gateway(settings, VllmEngine(settings), lambda: publisher)
    await gateway.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://gateway") as http:
        opened = (await http.post("/rollouts", json={"task_id": "t"})).json()
        url, headers = opened["base_url"] + "/chat/completions", {"x-api-key": opened["api_key"]}
        messages: list[dict[str, Any]] = list(TALK.messages)
        for turn in range(3):
            body = {"messages": messages, "stream": turn == 1, "seed": turn}
            assert 200 == (await http.post(url, json=body, headers=headers, timeout=120)).status_code
            messages = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "more"}]
        long = [{"role": "user", "content": "add " * 3000}]
        overflow = await http.post(url, json={"messages": long}, headers=headers, timeout=120)
    await gateway.stop()

    assert (400, "context_length_exceeded") == (overflow.status_code, overflow.json()["error"]["code"])
    calls = [record for record in publisher.records if isinstance(record, ModelCall)]
    calls = [call for call in calls if call.outcome is not Outcome.REJECTED]
    prompts, failed = decode_prompts(calls)
    assert (3, {}, [()] * 3) == (len(calls), failed, [call.defects for call in calls])
    for call in calls:
        output = unpack_ids(call.output_ids)
        assert ((VersionSpan(0, len(output), 0),), LogprobSemantics.PROCESSED) == (
            call.version_spans,
            call.logprob_semantics,
        )
        wanted = rescored(vllm.model_dir, prompts[call.call_id], output, 0.7)
        np.testing.assert_allclose(
            unpack_floats(call.output_logprobs), wanted, atol=5e-2
        )  # vLLM's CPU kernels: bfloat16


async def test_both_paths_sample_the_same(engine: VllmEngine) -> None:
    """The exact routes and the fallback: equal prompts, ids and log-probabilities; only the version is not told."""
    params = SamplingParams(0.7, 1.0, -1, 8, seed=3)
    prompt, exact, plain = await engine.render(TALK), Answer(), Answer()
    await engine.generate(prompt, params, "a", exact)
    engine._has_scale_out = False
    await engine.generate(await engine.render(TALK), params, "b", plain)

    assert (exact.ids, exact.logprobs) == (plain.ids, plain.logprobs)
    assert exact.finish is not None
    assert plain.finish is not None
    assert ("0", ()) == (exact.finish.spans[0].label.replace("default", "0"), plain.finish.spans)
    assert prompt.tolist() == plain.finish.prompt_ids.tolist()  # type: ignore[union-attr]
    assert LogprobSemantics.PROCESSED == await engine._probe_semantics(prompt)


async def test_prompt_that_is_too_long_is_told_apart(engine: VllmEngine) -> None:
    """Render and generate word it differently; both mean the context."""
    reasons = []
    for attempt in (
        engine.render(Conversation([{"role": "user", "content": "add " * 3000}])),
        engine.generate(np.full(3000, 5, dtype=np.uint32), SamplingParams(1.0, 1.0, -1, 2), "c", Answer()),
    ):
        with pytest.raises(ProviderError) as error:
            await attempt
        reasons.append(error.value.reason)

    assert ["context_length", "context_length"] == reasons


async def test_new_weights_change_answers_and_label(engine: VllmEngine, tiny_model: Path, tmp_path: Path) -> None:
    """After loading another folder the same seed samples other tokens, under the new version; then back again."""
    shutil.copytree(tiny_model, tmp_path / "w")
    weights = {name: values * -1.5 for name, values in load_file(tiny_model / "model.safetensors").items()}
    save_file(weights, tmp_path / "w" / "model.safetensors", {"format": "pt"})
    prompt, params = await engine.render(TALK), SamplingParams(0.2, 1.0, -1, 8, seed=3)
    before, after, back = Answer(), Answer(), Answer()
    await engine.generate(prompt, params, "d", before)
    await engine.load_policy(7, str(tmp_path / "w"))
    await engine.generate(prompt, params, "e", after)
    await engine.load_policy(0, str(tiny_model))
    await engine.generate(prompt, params, "f", back)

    assert after.finish is not None
    assert back.finish is not None
    assert ("7", "0") == (after.finish.spans[0].label, back.finish.spans[0].label)
    assert (False, True) == (before.ids == after.ids, before.ids == back.ids)


async def test_engine_that_dies_mid_call_leaves_what_it_sampled(engine: VllmEngine, vllm: VllmServer) -> None:
    """Ids that came before the death are kept, and the engine that is gone is told apart from one that fails."""
    answer = Answer()
    prompt = await engine.render(TALK)

    class KillsAtTheTenth(list[int]):
        def extend(self, values: Any) -> None:
            super().extend(values)
            if len(self) >= 10 and vllm.process.is_running():
                vllm.kill()

    answer.ids = KillsAtTheTenth()
    with pytest.raises(ProviderError) as died:
        await engine.generate(prompt, SamplingParams(1.0, 1.0, -1, 1900, seed=1), "g", answer)
    with pytest.raises(ProviderError) as away:
        await engine.start()

    assert ("engine_error", "engine_down") == (died.value.reason, away.value.reason)
    assert len(answer.ids) == len(answer.logprobs) >= 10
