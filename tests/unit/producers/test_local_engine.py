"""The engine in this process, over a tiny model made on the spot."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation, Identity, Ids
from rollstream.producers.engines.local import LocalEngine
from rollstream.schemas.records import LogprobSemantics, SamplingParams

TALK = Conversation([{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 2?"}])
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def other_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with other weights of the same shape."""
    folder = tmp_path_factory.mktemp("weights")
    weights = {name: values * -1.5 for name, values in load_file(tiny_model / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(tiny_model, max_context_tokens=512)
    await engine.start()
    yield engine
    await engine.close()


def sampling(
    temperature: float = 1.0, max_tokens: int = 8, seed: int | None = 1, stop: tuple[str, ...] = ()
) -> SamplingParams:
    return SamplingParams(temperature, 1.0, -1, max_tokens, seed, stop)


async def ask(engine: LocalEngine, prompt: Ids, params: SamplingParams) -> Answer:
    answer = Answer()
    await engine.generate(prompt, params, "id", answer)
    return answer


def rescored(folder: Path, prompt: Ids, answer: Answer, temperature: float) -> np.ndarray:
    """Log-probabilities of the answer by one plain forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([*prompt.tolist(), *answer.ids])
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0].numpy()


async def test_logprobs_are_those_of_a_plain_forward_pass(engine: LocalEngine, tiny_model: Path) -> None:
    """Prompts of several lengths and temperatures, sampled together, scored again one by one."""
    prompts = [await engine.render(Conversation([{"role": "user", "content": "add " * n}])) for n in (1, 7, 30)]
    temperatures = [0.5, 1.0, 1.7]

    answers = await asyncio.gather(
        *(ask(engine, p, sampling(t, seed=i)) for i, (p, t) in enumerate(zip(prompts, temperatures, strict=True)))
    )

    for prompt, answer, temperature in zip(prompts, answers, temperatures, strict=True):
        np.testing.assert_allclose(answer.logprobs, rescored(tiny_model, prompt, answer, temperature), atol=1e-4)


async def test_seeded_request_samples_the_same_in_any_company(engine: LocalEngine) -> None:
    """Alone or among others of other lengths, which end earlier or later: the same ids."""
    prompt = await engine.render(TALK)
    others = [await engine.render(Conversation([{"role": "user", "content": "sum " * n}])) for n in range(1, 30)]

    alone = await ask(engine, prompt, sampling(seed=7, max_tokens=20))
    together = await asyncio.gather(
        ask(engine, prompt, sampling(seed=7, max_tokens=20)),
        *(ask(engine, other, sampling(seed=n, max_tokens=1 + n % 5)) for n, other in enumerate(others)),
    )

    assert alone.ids == together[0].ids
    np.testing.assert_allclose(alone.logprobs, together[0].logprobs, atol=1e-4)
    assert [1 + n % 5 for n in range(len(others))] >= [len(answer.ids) for answer in together[1:]]


async def test_unseeded_requests_differ(engine: LocalEngine) -> None:
    """A group of rollouts of one prompt is no group of copies."""
    prompt = await engine.render(TALK)

    answers = await asyncio.gather(*(ask(engine, prompt, sampling(seed=None)) for _ in range(4)))

    assert 4 == len({tuple(answer.ids) for answer in answers})


async def test_samples_follow_the_distribution(engine: LocalEngine) -> None:
    """First tokens of many requests come as often as their probabilities say (chi-square, 5 sigma)."""
    prompt = await engine.render(TALK)
    answers = await asyncio.gather(*(ask(engine, prompt, sampling(0.3, 1, seed=n)) for n in range(1000)))
    counts = np.bincount([answer.ids[0] for answer in answers], minlength=512)
    chances = np.zeros(512)
    for answer in answers:
        chances[answer.ids[0]] = np.exp(answer.logprobs[0])

    top = np.argsort(chances)[-20:]
    expected = 1000 * chances[top]
    chi_square = float(((counts[top] - expected) ** 2 / expected).sum())

    assert chi_square < 20 + 5 * np.sqrt(2 * 20)


async def test_greedy_takes_the_likeliest(engine: LocalEngine, tiny_model: Path) -> None:
    """At temperature 0 the log-probabilities are those of the undivided logits."""
    prompt = await engine.render(TALK)

    first, second = await ask(engine, prompt, sampling(0.0, seed=1)), await ask(engine, prompt, sampling(0.0, seed=2))

    assert first.ids == second.ids
    np.testing.assert_allclose(first.logprobs, rescored(tiny_model, prompt, first, 1.0), atol=1e-4)


async def test_answer_ends_with_its_stop_string_or_limit(engine: LocalEngine) -> None:
    """A stop string ends it behind the token that completed it; the limit is a length."""
    prompt = await engine.render(TALK)
    free = await ask(engine, prompt, sampling(max_tokens=12))
    word = engine._backend.decode(free.ids[:4])

    stopped = await ask(engine, prompt, sampling(max_tokens=12, stop=(word,)))

    assert free.finish is not None
    assert stopped.finish is not None
    assert ("length", 12, "stop", free.ids[:4]) == (
        free.finish.reason,
        len(free.ids),
        stopped.finish.reason,
        stopped.ids,
    )
    assert (None, word) == (free.finish.stop_string, stopped.finish.stop_string)


async def test_new_weights_change_what_is_sampled_and_the_label(
    engine: LocalEngine, tiny_model: Path, other_weights: Path
) -> None:
    """After the swap answers come from the new weights and say so; a call that waited says which it got."""
    prompt = await engine.render(TALK)
    before = await ask(engine, prompt, sampling())
    await engine.load_policy(7, str(other_weights))
    after = await ask(engine, prompt, sampling())

    assert before.finish is not None
    assert after.finish is not None
    assert ("0", "7", 7) == (before.finish.spans[0].label, after.finish.spans[0].label, engine.version)
    both = other_weights.parent / "both"
    shutil.copytree(tiny_model, both, dirs_exist_ok=True)
    shutil.copy(other_weights / "model.safetensors", both / "model.safetensors")
    np.testing.assert_allclose(after.logprobs, rescored(both, prompt, after, 1.0), atol=1e-4)


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "no file"])
async def test_wrong_weights_change_nothing(engine: LocalEngine, tiny_model: Path, tmp_path: Path, kind: str) -> None:
    """Weights of another model are refused as a whole; the old ones go on, under their old version."""
    weights = load_file(tiny_model / "model.safetensors")
    if kind == "missing":
        weights.pop("model.norm.weight")
    elif kind == "unknown":
        weights["other.weight"] = torch.ones(1)
    elif kind == "shape":
        weights["model.norm.weight"] = torch.ones(3)
    if kind != "no file":
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = await engine.render(TALK)
    before = await ask(engine, prompt, sampling())

    with pytest.raises(ProviderError) as error:
        await engine.load_policy(7, str(tmp_path))
    after = await ask(engine, prompt, sampling())

    assert ("bad_weights", before.ids, 0) == (error.value.reason, after.ids, engine.version)


async def test_cancelled_request_leaves_what_there_is_and_the_others_go_on(engine: LocalEngine) -> None:
    """A client that leaves costs the others nothing."""
    prompt = await engine.render(TALK)
    answer = Answer()
    task = asyncio.create_task(engine.generate(prompt, sampling(max_tokens=400), "id", answer))
    other = asyncio.create_task(ask(engine, prompt, sampling(seed=3)))
    await asyncio.sleep(0)
    task.cancel()
    result = await other

    assert (True, 8) == (task.cancelled(), len(result.ids))
    assert len(answer.ids) == len(answer.logprobs)


async def test_rendering_is_that_of_the_tokenizer(engine: LocalEngine) -> None:
    """Ids of the chat template, with tools, and a tool call's arguments as they are."""
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"e":  "1"}'}}
    messages = [
        *TALK.messages,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]

    ids = await engine.render(Conversation(messages, TOOLS))

    wanted = engine._tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert wanted == ids.tolist()
    assert '{"e":  "1"}' in engine._backend.decode(ids.tolist())


async def test_echoed_tool_call_renders_to_what_was_sampled(engine: LocalEngine) -> None:
    """Prompt and answer are a prefix of the next prompt when the client echoes what it was shown."""
    text = 'ok\n<tool_call>\n{"name": "calculator", "arguments": {"e":  "1 + 1"}}\n</tool_call>'
    ids = [*engine._backend.encode(text, add_special_tokens=False).ids, 2]
    prompt = await engine.render(Conversation(TALK.messages, TOOLS))

    message = await engine.parse(TALK, ids, prompt, "", "c")
    content = message["content"].removesuffix("\n")  # this template writes a line break before a call itself
    echo = await engine.render(Conversation([*TALK.messages, {**message, "content": content}], TOOLS))

    assert '{"e":  "1 + 1"}' == message["tool_calls"][0]["function"]["arguments"]
    assert [*prompt.tolist(), *ids] == echo[: len(prompt) + len(ids)].tolist()


async def test_messages_that_the_template_refuses_are_the_clients_fault(engine: LocalEngine) -> None:
    """A template may raise anything; the client gets a 400, not the gateway a crash."""
    with pytest.raises(ProviderError) as error:
        await engine.render(Conversation([{"role": "tool"}]))

    assert "bad_request" == error.value.reason


async def test_identity_says_what_the_engine_is(engine: LocalEngine) -> None:
    """Processed log-probabilities, the model's vocabulary, the smaller of the two context limits."""
    found: Identity = engine.identity()

    assert ("local", 512, 512, LogprobSemantics.PROCESSED) == (
        found.engine, found.vocabulary_tokens, found.max_context_tokens, found.semantics,
    )  # fmt: skip
