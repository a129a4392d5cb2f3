"""The gateway on a real Kafka: as a process with a tiny model or a stand-in for vLLM, and in this process where a test must stop
the broker in the middle of a call.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollstream.process import ServiceProcess, free_port
from rollstream.producers.client import OpenRollout, RolloutClient
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.kafka import KafkaPublisher
from rollstream.producers.spool import Spool
from rollstream.schemas.codec import Codec
from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import CallDelivery, ModelCall, Record, RolloutOpened, Terminal
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import unpack_floats, unpack_ids
from rollstream.settings import GatewaySettings, KafkaSettings
from tests.end_to_end.processes import our_process
from tests.end_to_end.topic_reader import is_readable, read_topic
from tests.services import ROOT
from tests.services.kafka import KafkaBroker
from tests.unit.producers.fakes import FakeEngine

pytestmark = pytest.mark.kafka


def records_of(kafka: KafkaSettings, noun: str) -> list[Record]:
    return [Codec().decode(value) for _, value in read_topic(kafka, noun)]


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings of a gateway whose engine is the stand-in: it starts in a tenth of the time that a model takes."""
    port = free_port()
    command = [sys.executable, "-m", "chaos.engine", "--port", str(port)]
    with ServiceProcess("engine", command, log_file=tmp_path / "engine.log", cwd=ROOT) as engine:
        url = f"http://127.0.0.1:{port}"
        engine.wait_until(lambda: _is_healthy(url), 60, "it is healthy")
        yield {"GATEWAY__ENGINE_URL": url}


def with_model(folder: Path) -> dict[str, str]:
    """Settings of a gateway whose engine is a model in its own process."""
    return {"GATEWAY__ENGINE": "local", "GATEWAY__MODEL_PATH": str(folder)}


@contextmanager
def running_gateway(
    folder: Path, kafka: KafkaSettings, **engine: str
) -> Iterator[tuple[ServiceProcess, RolloutClient]]:
    """`rollstream gateway` on a free port."""
    variables = {
        "GATEWAY__PORT": "0",
        "GATEWAY__KEY_SECRET": "secret",
        "GATEWAY__SPOOL_DIR": str(folder / "spool"),
        "GATEWAY__MAX_OUTPUT_TOKENS": "8",
        **engine,
    }
    process = our_process("gateway", ["gateway"], folder, kafka, **variables)
    with process:
        process.wait_until(lambda: "listening on" in process.log_text(), 120, "it prints its address")
        found = re.search(r"listening on (http://\S+)", process.log_text())
        assert found is not None
        process.wait_until(lambda: _is_healthy(found[1]), 120, "it is healthy")
        with RolloutClient(found[1]) as client:
            yield process, client


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def chat_client(rollout: OpenRollout) -> openai.OpenAI:
    return openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0)


def test_rollout_of_the_official_client_is_in_kafka_whole(
    tmp_path: Path, kafka_settings: KafkaSettings, tiny_model: Path
) -> None:
    """Plain and streamed calls, an event and the end, of one rollout: every record, in order, in one partition number."""
    with running_gateway(tmp_path, kafka_settings, **with_model(tiny_model)) as (_, client):
        rollout = client.open_rollout("t-1", group_id="g-1", group_size=2, task={"q": 1})
        messages: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
        with chat_client(rollout) as chat:
            plain = chat.chat.completions.create(model="x", messages=messages, seed=1)
            with chat.chat.completions.create(
                model="x", messages=messages, seed=1, stream=True, stream_options={"include_usage": True}
            ) as stream:
                chunks = list(stream)
        event_id = rollout.event("tool_result", {"stdout": "4"}, 0.5, call_id=plain.id)
        rollout.finish("succeeded", {"reward": 1.0})

        calls, environment = records_of(kafka_settings, "calls"), records_of(kafka_settings, "environment")
        names = ["RolloutOpened", "CallStarted", "ModelCall", "CallStarted", "ModelCall", "Terminal"]
        assert names == [type(record).__name__ for record in calls]
        first, second = (record for record in calls if isinstance(record, ModelCall))
        assert (plain.id, chunks[0].id) == (first.call_id, second.call_id)
        assert (first.output_ids, True, True) == (second.output_ids, first.trainable, second.trainable)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (plain.choices[0].message.content or "") == text
        assert plain.usage is not None
        assert (
            plain.usage.completion_tokens
            == len(unpack_ids(first.output_ids))
            == len(unpack_floats(first.output_logprobs))
        )
        assert (first.call_id, plain.usage.prompt_tokens) == (second.prompt.base_call_id, second.prompt.base_len)
        assert event_id == environment[0].event_id  # type: ignore[union-attr]
        partitions = {partition for noun in TERMINAL_TOPICS for partition, _ in read_topic(kafka_settings, noun)}
        assert 1 == len(partitions)
        assert isinstance(records_of(kafka_settings, "terminals")[0], Terminal)


def test_every_answer_a_client_saw_is_in_kafka_after_a_crash(
    tmp_path: Path, kafka_settings: KafkaSettings, stand_in: dict[str, str]
) -> None:
    """Agents run, the gateway is killed, another one takes over with the same keys: no seen call is missing."""
    seen: list[str] = []

    def play(rollout: OpenRollout) -> None:
        messages: list[Any] = [{"role": "user", "content": "Add 3, 5 and 8."}]
        with chat_client(rollout) as chat:
            while True:
                try:
                    answer = chat.chat.completions.create(model="x", messages=messages)
                except openai.APIError:
                    return
                seen.append(answer.id)
                messages = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "more"}][
                    -9:
                ]

    with running_gateway(tmp_path / "a", kafka_settings, **stand_in) as (process, client):
        rollouts = [client.open_rollout("t", group_id=f"g-{n}") for n in range(8)]
        agents = [threading.Thread(target=play, args=(rollout,)) for rollout in rollouts]
        for agent in agents:
            agent.start()
        process.wait_until(lambda: len(seen) > 100, 120, "a hundred calls are answered")
        process.kill()
        for agent in agents:
            agent.join()
    with running_gateway(tmp_path / "a", kafka_settings, **stand_in) as (_, client):
        answer = httpx.post(
            f"{client._url}/r/{rollouts[0].rollout_id}/a/0/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "again"}]},
            headers={"authorization": f"Bearer {rollouts[0].api_key}"},
            timeout=60,
        )

    assert 200 == answer.status_code
    calls = [record for record in records_of(kafka_settings, "calls") if isinstance(record, ModelCall)]
    assert set() == {*seen, answer.json()["id"]} - {call.call_id for call in calls}
    mine = [call for call in calls if call.rollout_id == rollouts[0].rollout_id]
    assert sorted(call.call_index for call in mine) == [call.call_index for call in mine]
    assert {} == decode_prompts(mine)[1]


async def test_outage_between_intent_and_outcome_loses_nothing(
    tmp_path: Path, kafka: KafkaBroker, kafka_settings: KafkaSettings
) -> None:
    """The broker freezes while the engine samples: 503 and spool; it comes back: outcome, then correction, spool empty."""
    engine = FakeEngine()
    original = engine.generate

    async def generate_then_freeze(*arguments: Any) -> None:
        await original(*arguments)
        kafka.pause()

    settings = GatewaySettings(key_secret="s", spool_dir=tmp_path / "spool", ack_timeout_s=1.0)
    gateway = Gateway(settings, engine, lambda: KafkaPublisher(kafka_settings))
    await gateway.start()
    transport = httpx.ASGITransport(gateway.app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            opened: dict[str, Any] = {}
            while "base_url" not in opened:  # the first acknowledgement of a new producer may take seconds
                opened = (await http.post("/rollouts", json={"task_id": "t", "rollout_id": "r-1"})).json()
            engine.generate = generate_then_freeze  # type: ignore[method-assign]
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
            url, headers = opened["base_url"] + "/chat/completions", {"x-api-key": opened["api_key"]}
            during = await http.post(url, content=body, headers=headers)
            refused = await http.post("/rollouts", json={"task_id": "t"})
            spooled = len(Spool(tmp_path / "spool").files())
            kafka.resume()
            while Spool(tmp_path / "spool").files() or not is_readable(kafka_settings, "calls"):
                await asyncio.sleep(0.01)
            engine.generate = original  # type: ignore[method-assign]
            after = await http.post(url, content=body, headers=headers)
    finally:
        kafka.resume()
        await gateway.stop()

    assert (503, 503, 2, 200) == (during.status_code, refused.status_code, spooled, after.status_code)
    mine = [r for r in records_of(kafka_settings, "calls") if getattr(r, "rollout_id", "") == opened["rollout_id"]]
    mine = [record for record in mine if not isinstance(record, RolloutOpened)]
    assert ["CallStarted", "ModelCall", "CallDelivery", "CallStarted", "ModelCall"] == [
        type(r).__name__ for r in mine
    ]
    lost, correction, retried = mine[1], mine[2], mine[4]
    assert isinstance(lost, ModelCall)
    assert isinstance(correction, CallDelivery)
    assert isinstance(retried, ModelCall)
    assert (lost.call_id, "ack_timeout") == (correction.call_id, correction.reason)
    assert (lost.call_id, 1) == (retried.call_id, retried.call_attempt)


def test_new_weights_are_served_and_announced(
    tmp_path: Path, kafka_settings: KafkaSettings, tiny_model: Path
) -> None:
    """Calls say the new version, the policies topic names it, a restart finds it there, and other replicas follow."""
    with running_gateway(tmp_path, kafka_settings, **with_model(tiny_model)) as (_, client):
        client.publish_policy(3, str(tiny_model), step=30)
        rollout = client.open_rollout("t")
        with chat_client(rollout) as chat:
            chat.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])

        call = records_of(kafka_settings, "calls")[-1]
        (policy,) = records_of(kafka_settings, "policies")
        version = client.stats()["policy_version"]
        assert isinstance(call, ModelCall)
        assert [3] == [span.version for span in call.version_spans]
        assert (3, 30, 3) == (policy.version, policy.step, version)  # type: ignore[union-attr]

    with running_gateway(tmp_path / "b", kafka_settings, **with_model(tiny_model)) as (process, client):
        assert 3 == client.stats()["policy_version"]
        with running_gateway(tmp_path / "c", kafka_settings, **with_model(tiny_model)) as (_, replica):
            replica.publish_policy(4, str(tiny_model))
        process.wait_until(lambda: client.stats()["policy_version"] == 4, 60, "it follows what the other published")
