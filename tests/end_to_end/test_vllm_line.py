"""The whole line with real parts: vLLM, the gateway, Apache Kafka, the Faust processors, ClickHouse, the trainer's reader."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from rollstream.process import ServiceProcess
from rollstream.producers import RolloutClient
from rollstream.schemas.topics import topics
from rollstream.schemas.types import unpack_floats, unpack_ids, unpack_mask
from rollstream.settings import KafkaSettings
from rollstream.sinks.audit import audit
from rollstream.sinks.connect import connect
from rollstream.trainers import SampleGroup, SampleReader
from tests.end_to_end.processes import our_process
from tests.end_to_end.topic_reader import uncommitted
from tests.services.vllm import VllmServer

GROUPS, SIZE, TURNS = 2, 2, 3


@pytest.mark.kafka
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_what_an_agent_saw_of_vllm_is_what_the_trainer_gets(
    vllm: VllmServer, kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    """Texts that the official client received, plain and streamed, are the sampled tokens of the samples; the audit holds."""
    tokenizer = AutoTokenizer.from_pretrained(vllm.model_dir)
    store = f"chdb://{tmp_path / 'clickhouse'}"
    gateway = our_process(
        "gateway",
        ["gateway"],
        tmp_path,
        kafka_settings,
        GATEWAY__PORT="0",
        GATEWAY__ENGINE_URL=vllm.base_url,
        GATEWAY__MODEL_NAME="policy",
        GATEWAY__MAX_OUTPUT_TOKENS="12",
        GATEWAY__SPOOL_DIR=str(tmp_path / "spool"),
    )
    processor = our_process("processor", ["processor"], tmp_path, kafka_settings)
    sink = our_process("sink", ["sink", "clickhouse"], tmp_path, kafka_settings, SINK__CLICKHOUSE=store)

    with gateway, processor, sink, SampleReader(kafka_settings, trainer="test") as reader:
        said = _play(_address(gateway))
        groups = reader.next_groups(GROUPS, 120)
        reader.record_step(step=0, version_before=0, version_after=1, groups=groups)
        group = f"{kafka_settings.prefix}.sink.clickhouse"
        sink.wait_until(lambda: uncommitted(kafka_settings, group, topics()) == 0, 60, "everything is stored")
    report = audit(connect(store, migrate=False), closed=True)

    assert {group.group_id for group in groups} == {f"g-{g}" for g in range(GROUPS)}
    for rollout, texts in said.items():
        sampled = _sampled_texts(groups, rollout, tokenizer)
        assert len(sampled) == TURNS
        assert all(_is_shown(text, whole) for text, whole in zip(texts, sampled, strict=True)), (texts, sampled)
    assert report.ok, str(report)
    assert report.as_dict()["counts"]["calls started"] == GROUPS * SIZE * TURNS


def _is_shown(text: str, sampled: str) -> bool:
    """Whether a text is what the tokens say; vLLM holds back a last character whose bytes are not all there."""
    return text == sampled or (sampled.startswith(text) and sampled.endswith("\N{REPLACEMENT CHARACTER}"))


def _play(gateway_url: str) -> dict[str, list[str]]:
    """Play all rollouts at once. Returns: the assistant texts of each rollout, in order."""
    said: dict[str, list[str]] = {}
    failures: list[BaseException] = []

    def rollout(group: int, member: int) -> None:
        try:
            with RolloutClient(gateway_url) as client:
                opened = client.open_rollout(
                    "sum", group_id=f"g-{group}", group_size=SIZE, rollout_id=f"g-{group}.r-{member}"
                )
                said[opened.rollout_id] = _talk(
                    OpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0), member
                )
                opened.event("observation", {"said": said[opened.rollout_id]})
                opened.finish("succeeded", {"reward": float(member)})
        except BaseException as failure:  # noqa: BLE001 - told to the test's own thread
            failures.append(failure)

    threads = [threading.Thread(target=rollout, args=(g, m)) for g in range(GROUPS) for m in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return said


def _talk(client: OpenAI, seed: int) -> list[str]:
    messages: list[dict[str, str]] = [{"role": "user", "content": "What is the sum of 17 and 25?"}]
    texts = []
    for turn in range(TURNS):
        text = ""
        if turn % 2:
            stream = client.chat.completions.create(model="any", messages=messages, seed=seed, stream=True)  # type: ignore[call-overload]
            for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        else:
            answer = client.chat.completions.create(model="any", messages=messages, seed=seed)  # type: ignore[arg-type]
            text = answer.choices[0].message.content or ""
        texts.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And plus {turn}?"}]
    return texts


def _address(gateway: ServiceProcess) -> str:
    gateway.wait_until(lambda: "startup complete" in gateway.log_text(), 120, "it serves")
    found = re.search(r"listening on (http://\S+)", gateway.log_text())
    assert found is not None, gateway.log_text()
    return found[1]


def _sampled_texts(groups: list[SampleGroup], rollout_id: str, tokenizer: object) -> list[str]:
    """The texts of a rollout's calls, decoded from the sampled tokens of its samples, in order of the calls."""
    texts: list[tuple[int, str]] = []
    for sample in (s for group in groups for s in group.samples if s.rollout_id == rollout_id):
        ids, mask, logprobs = unpack_ids(sample.ids), unpack_mask(sample.mask), unpack_floats(sample.logprobs)
        for segment in sample.segments:
            assert mask[segment.start : segment.end].all()
            assert (logprobs[segment.start : segment.end] <= 0).all()
            text = tokenizer.decode(ids[segment.start : segment.end], skip_special_tokens=True)  # type: ignore[attr-defined]
            texts.append((segment.start, text))
        assert mask.sum() == sum(segment.end - segment.start for segment in sample.segments)
    return [text for _, text in sorted(texts)]
