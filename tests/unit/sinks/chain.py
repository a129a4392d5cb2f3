"""A whole run in memory: source records, the real stages, and every topic's records as a broker would hold them.

It holds what an audit must tell apart: calls that share a sample, calls that start one, a retokenised prompt, a defect,
an answer that did not arrive, a call that got lost, an unreadable record, a late call, a group without spread, and
a group that is still open.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.processors.base import Event, Position, Stage, Step
from rollstream.processors.pipeline import Pipeline, load_pipeline
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.identity import digest_ids, digest_json
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    CallDelivery,
    CallStarted,
    DeadLetter,
    Delivery,
    Encoding,
    EnvironmentEvent,
    EventKind,
    LogprobSemantics,
    ModelCall,
    Outcome,
    PolicyVersion,
    Record,
    RolloutOpened,
    RolloutStatus,
    SamplingParams,
    Terminal,
    VersionSpan,
)
from rollstream.schemas.topics import TERMINAL_TOPICS, topics
from rollstream.schemas.types import Json, pack_floats, pack_ids
from rollstream.sinks.base import Chunk, LogRecord, Source

ROOT = Path(__file__).parents[3]
CODEC = Codec()
START_MS = 1_790_000_000_000


@dataclass
class Log:
    """Every topic's records, one partition each."""

    records: dict[str, list[Record]] = field(default_factory=lambda: {noun: [] for noun in topics()})

    def add(self, noun: str, record: Record) -> int:
        self.records[noun].append(record)
        return len(self.records[noun]) - 1

    def chunks(self, size: int | None = None) -> list[Chunk]:
        """All records as chunks, `size` records each; None makes one a topic."""
        found = []
        for noun, records in self.records.items():
            logged = [LogRecord(i, CODEC.encode(r), noun.encode(), event_time_ms(r)) for i, r in enumerate(records)]
            for at in range(0, len(logged), size or max(len(logged), 1)):
                part = tuple(logged[at : at + (size or len(logged))])
                source = Source(topics()[noun].name(), 0, "id-0")
                found.append(Chunk(source, part[0].offset, part[-1].offset, part))
        return found


class Writer:
    """Writes what gateway and environment would write for one rollout."""

    def __init__(self, log: Log, group_id: str, number: int, group_size: int, seed: int = 0) -> None:
        self.log, self.group_id, self.group_size = log, group_id, group_size
        self.rollout_id = f"{group_id}-r{number}"
        self.random = np.random.default_rng([seed, number, sum(group_id.encode())])
        self.known: dict[str, Any] = {}
        self.ids = self.random.integers(0, 1000, 20).astype(np.uint32)
        self.now_ms = START_MS + number * 1000
        self.count = 0
        log.add(
            "calls",
            RolloutOpened(
                self.rollout_id, 0, group_id, group_size, "task-1", self.now_ms, Json('{"q":1}'), "default"
            ),
        )

    def call(
        self,
        *,
        tokens: int = 6,
        fresh: bool = False,
        defect: str | None = None,
        delivered: Delivery = Delivery.FULL,
        lost: bool = False,
        version: int = 3,
    ) -> str:
        """One call. Args: fresh: its prompt shares only a part with earlier ones. lost: there is no outcome."""
        index, self.count = self.count, self.count + 1
        call_id = f"{self.rollout_id}-c{index}"
        prompt = np.concatenate(
            [self.ids[: 10 if fresh else None], self.random.integers(0, 1000, 5).astype(np.uint32)]
        )
        delta = encode_prompt(prompt, self.known)
        output = self.random.integers(0, 1000, tokens).astype(np.uint32)
        self.now_ms += 10
        request, sampling = digest_json("request", call_id), SamplingParams(1.0, 1.0, -1, 64)
        common = {"call_id": call_id, "rollout_id": self.rollout_id, "attempt": 0, "group_id": self.group_id}
        self.log.add(
            "calls",
            CallStarted(
                **common,
                call_index=index,
                prompt_length_tokens=len(prompt),
                prompt_digest=digest_ids(pack_ids(prompt)),
                request_digest=request,
                started_at_ms=self.now_ms,
                protocol="openai-chat",
                prompt_suffix=delta.suffix,
                prompt_base_call_id=delta.base_call_id,
                prompt_base_len=delta.base_len,
                sampling=sampling.as_json(),
            ),
        )
        if lost:
            return call_id
        logprobs = -self.random.random(tokens).astype(np.float32) - 0.01
        cut = tokens // 2
        self.log.add(
            "calls",
            ModelCall(
                **common,
                call_index=index,
                protocol="openai-chat",
                adapter_version="1",
                model_requested="gpt-x",
                model_served="policy",
                engine="vllm",
                engine_version="0.32.0",
                encoding=Encoding("t", "c", "k", "hermes"),
                sampling=sampling,
                logprob_semantics=LogprobSemantics.PROCESSED,
                prompt=delta,
                output_ids=pack_ids(output),
                output_logprobs=pack_floats(logprobs if defect != "logprob_missing" else logprobs * np.nan),
                version_spans=(VersionSpan(0, cut, version), VersionSpan(cut, tokens, version + 1)),
                policy="default",
                finish_reason="stop",
                outcome=Outcome.COMPLETED,
                delivered=Delivery.UNKNOWN,
                trainable=defect is None,
                defects=(defect,) if defect else (),
                request_digest=request,
                started_at_ms=self.now_ms,
                finished_at_ms=self.now_ms + 5,
                message=Json('{"role":"assistant"}'),
            ),
        )
        if delivered is not Delivery.FULL:
            self.log.add(
                "calls", CallDelivery(**common, delivered=delivered, reason="client_disconnected", at_ms=self.now_ms)
            )
        self.known[call_id] = np.concatenate([prompt, output])
        self.ids = self.known[call_id]
        self.log.add(
            "environment",
            EnvironmentEvent(
                event_id=f"{call_id}-e",
                rollout_id=self.rollout_id,
                attempt=0,
                group_id=self.group_id,
                kind=EventKind.TOOL_RESULT,
                content=Json('{"text":"ok"}'),
                at_ms=self.now_ms + 6,
                call_id=call_id,
            ),
        )
        return call_id

    def finish(self, reward: float, status: RolloutStatus = RolloutStatus.SUCCEEDED) -> None:
        terminal = Terminal(
            rollout_id=self.rollout_id,
            attempt=0,
            group_id=self.group_id,
            group_size=self.group_size,
            task_id="task-1",
            status=status,
            finished_at_ms=self.now_ms + 10,
            outcome=Json(f'{{"reward":{reward}}}'),
        )
        for noun in TERMINAL_TOPICS:
            self.log.add(noun, terminal)


def make_log(pipeline: Pipeline | None = None) -> Log:
    """The run that the tests look at."""
    log = Log()
    log.add("policies", PolicyVersion("default", 3, "file:///weights/3", START_MS))
    write_group_one(log)
    for number in range(2):  # no spread
        writer = Writer(log, "g-2", number, 2)
        writer.call()
        writer.finish(1.0)
    writer = Writer(log, "g-3", 0, 2)  # still open
    writer.call()
    run_stages(log, pipeline or load_pipeline(ROOT / "pipelines/default.yaml"))
    return log


def write_group_one(log: Log) -> None:
    """Three rollouts with everything that can happen to a call."""
    first = Writer(log, "g-1", 0, 3)
    first.call()
    first.call()
    first.call(fresh=True)
    first.finish(1.0)
    first.call()  # late: behind the terminal
    second = Writer(log, "g-1", 1, 3)
    second.call()
    second.call(defect="logprob_missing")
    second.call(fresh=True)
    second.call(lost=True)
    second.finish(0.0)
    third = Writer(log, "g-1", 2, 3)
    third.call(tokens=9)
    third.call(delivered=Delivery.PARTIAL)
    third.finish(0.5)


def run_stages(log: Log, pipeline: Pipeline) -> None:
    """Feed every stage what is in its topics, and put what it makes into its own."""
    for stage in pipeline.build_stages(0):
        for noun in stage.inputs:
            for offset, record in enumerate(list(log.records[noun])):
                value = CODEC.encode(record)
                event = Event(Position(noun, 0, offset), record, event_time_ms(record), value)
                _do(log, stage, stage.apply(event))


def _do(log: Log, stage: Stage, step: Step) -> None:
    for reject in step.rejects:
        position = reject.event.position
        log.add(
            "dead-letters",
            DeadLetter(
                dead_letter_id=digest_json(position.noun, position.offset, reject.boundary, reject.reason),
                boundary=reject.boundary,
                reason=reject.reason,
                message=reject.message,
                topic=topics()[position.noun].name(),
                partition=0,
                offset=position.offset,
                value=reject.event.value,
                at_ms=reject.event.time_ms,
                rollout_id=getattr(reject.event.record, "rollout_id", None),
                call_id=getattr(reject.event.record, "call_id", None),
            ),
        )
    for emit in step.emits:
        for record in emit.records:
            log.add(stage.output, record)
        stage.item_done(emit.item)
    for work in step.work:
        _do(log, stage, stage.work_done(work.key, asyncio.run(work.run())))  # type: ignore[arg-type]
