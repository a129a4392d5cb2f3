"""The stand-in engine behind the gateway's own vLLM client, over a socket of the loopback address."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from chaos.engine import Engine, serve
from chaos.truth import from_ids, render, sample, text_of, to_ids
from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.schemas.records import LogprobSemantics, SamplingParams
from rollstream.settings import GatewaySettings

TALK = Conversation([{"role": "user", "content": "go on"}])
PARAMS = SamplingParams(0.7, 1.0, -1, 32, 5)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def url(engine: Engine) -> AsyncIterator[str]:
    server = await serve("127.0.0.1", 0, engine)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[VllmEngine]:
    client = VllmEngine(GatewaySettings(engine_url=url, engine_timeout_s=0.5))
    await client.start()
    yield client
    await client.close()


async def ask(client: VllmEngine) -> Answer:
    answer = Answer()
    await client.generate(await client.render(TALK), PARAMS, "call-1-0", answer)
    return answer


async def test_gateway_takes_it_for_vllm_with_processed_logprobs(client: VllmEngine) -> None:
    """It is probed as a scale-out server whose log-probabilities may be trained on."""
    identity = client.identity()

    assert ("vllm", LogprobSemantics.PROCESSED, "vllm") == (
        identity.engine, identity.semantics, identity.encoding.parser,
    )  # fmt: skip
    assert await client.health() is None


async def test_answer_is_the_truth(client: VllmEngine) -> None:
    """Prompt, ids, log-probabilities, spans, end and text are what `chaos.truth` says."""
    prompt = await client.render(TALK)
    answer = await ask(client)
    message = await client.parse(TALK, answer.ids, prompt, answer.text, "call-1")

    said = sample(render(TALK.messages), request_id="call-1-0", temperature=0.7, max_tokens=32, seed=5)
    assert answer.finish is not None
    assert render(TALK.messages) == from_ids(prompt)
    assert to_ids(said.tokens).tolist() == answer.ids
    assert list(said.logprobs) == answer.logprobs
    assert [(s.start, s.end, str(s.version)) for s in said.spans] == [
        (s.start, s.end, s.label) for s in answer.finish.spans
    ]
    assert (said.finish_reason, len(said.tokens)) == (answer.finish.reason, answer.finish.output_tokens)
    assert np.array_equal(prompt, answer.finish.prompt_ids)  # type: ignore[arg-type]
    assert {"role": "assistant", "content": text_of(said.tokens)} == message


@pytest.mark.parametrize(("kind", "has_begun"), [("error", False), ("hang", False), ("cut", True)])
async def test_it_misbehaves_as_often_as_asked(client: VllmEngine, url: str, kind: str, has_begun: bool) -> None:
    """500, no answer, and a connection that is closed after the first tokens; then it is well again."""
    async with httpx.AsyncClient(base_url=url) as control:
        await control.post("/control", json={"kind": kind, "requests": 1})

        answer = Answer()
        with pytest.raises(ProviderError) as found:
            await client.generate(await client.render(TALK), PARAMS, "call-1-0", answer)
        well = await ask(client)
        left = (await control.get("/control")).json()["spoiled"]

    assert "engine_error" == found.value.reason
    assert well.finish is not None
    assert answer.ids == (well.ids[: len(answer.ids)] if has_begun else [])
    assert [] == left


async def test_unknown_misbehaviour_and_route_are_refused(url: str) -> None:
    """A schedule with a typing error does not pass for one that was carried out."""
    async with httpx.AsyncClient(base_url=url) as control:
        wrong = await control.post("/control", json={"kind": "explode", "requests": 1})
        nowhere = await control.get("/nowhere")

    assert (400, 404) == (wrong.status_code, nowhere.status_code)
    assert "expected one of" in wrong.json()["error"]["message"]
