"""What open rollouts cost: a worker's memory for each encoded byte it holds, and how long it takes to be back after SIGKILL.

A real broker, the real stages. Rollouts are opened and their calls written, none is finished; so the worker holds everything,
and reads everything again at its next start. Beside it stands what one plain read of the same bytes takes in the same run:
fetch every record and decode it, and nothing else.

`python -m benchmarks.bench_recovery --full` holds 10,000 rollouts of 50,000 tokens, 4 GB; the default is a twentieth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, Producer, TopicPartition
from faust.types import TP

from benchmarks.measure import Figure, report
from rollstream.kafka import client_properties, producer_properties
from rollstream.process import ServiceProcess
from rollstream.processors.pipeline import load_pipeline
from rollstream.processors.shell.admission import kinds_by_topic
from rollstream.processors.shell.handler import Shell
from rollstream.processors.shell.run import run_shell
from rollstream.processors.shell.transport import End
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.readable import from_readable
from rollstream.schemas.records import ModelCall, Record, RolloutOpened
from rollstream.schemas.topics import topics
from rollstream.schemas.types import pack_floats, pack_ids
from rollstream.settings import KafkaSettings, ProcessorSettings, Settings
from rollstream.topic_admin import apply_topics

PARTITIONS = 6
CALLS = 20
"""Calls of a rollout; half of a call's new tokens are prompt, half output."""
RESTARTS = 3
STAGES = ["join", "group", "score", "reward", "credit", "build"]
CAUGHT_UP = "caught up after"
_WAIT_S = 1_800.0


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of a rollout")
    parser.add_argument("--worker", nargs=3, metavar=("BOOTSTRAP", "PREFIX", "EVENTS"), help="be the worker process")
    args = parser.parse_args()
    if args.worker:
        run_worker(*args.worker)
        return
    _measure(10_000 if args.full else args.rollouts, args.tokens)


def _measure(rollouts: int, tokens: int) -> None:
    from tests.services.kafka import KafkaBroker

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(KafkaBroker(folder / "kafka"))
        kafka = KafkaSettings(bootstrap=broker.bootstrap, prefix=f"b{uuid.uuid4().hex[:6]}", partitions=PARTITIONS)
        apply_topics(kafka)
        worker = stack.enter_context(_worker(kafka, folder, 0))
        _wait(worker)
        idle_bytes = _rss_bytes(worker.pid)
        worker.kill()
        events, encoded_bytes = _produce(kafka, rollouts, tokens)
        plain_s = {
            "plain read, aiokafka": _plain(lambda: asyncio.run(_read_aiokafka(kafka, events))),
            "plain read, confluent-kafka": _plain(lambda: _read_confluent(kafka, events)),
        }
        back_s, read_s, rss_bytes = [], [], []
        for _ in range(RESTARTS):
            worker = stack.enter_context(_worker(kafka, folder, events))
            began = time.monotonic()
            read_s.append(_wait(worker))
            back_s.append(time.monotonic() - began)
            rss_bytes.append(_rss_bytes(worker.pid) - idle_bytes)
            worker.kill()
    ratio = median(rss_bytes) / encoded_bytes
    shape = f"{rollouts:,} open rollouts of {tokens:,} tokens, {events:,} events, {encoded_bytes / 1e6:,.0f} MB"
    report(
        "recovery",
        [
            *(_figure(what, seconds) for what, seconds in plain_s.items()),
            _figure("worker, first record asked for to gates open", read_s, shape),
            _figure(
                "worker, start of the process to gates open", back_s,
                f"memory grows by {ratio:.2f} bytes for each encoded byte, from {idle_bytes / 1e6:.0f} MB",
            ),
        ],
    )  # fmt: skip


def _figure(what: str, seconds: list[float], note: str = "") -> Figure:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e6
    return Figure(what, len(seconds), float(p50), float(p99), note)


def _plain(read: Callable[[], None]) -> list[float]:
    seconds = []
    for _ in range(RESTARTS):
        began = time.monotonic()
        read()
        seconds.append(time.monotonic() - began)
    return seconds


def _produce(kafka: KafkaSettings, rollouts: int, tokens: int) -> tuple[int, int]:
    """Write the rollouts, one after the other. Returns: events and bytes written."""
    codec, producer, num_bytes, num_events = Codec(), Producer(producer_properties(kafka)), 0, 0
    for number in range(rollouts):
        for record in _rollout(number, tokens):
            m = to_message(record, codec, prefix=kafka.prefix, source="/bench")
            while True:
                try:
                    producer.produce(m.topic, m.value, m.key, headers=list(m.headers))
                    break
                except BufferError:
                    producer.poll(1)
            num_bytes += len(m.value)
            num_events += 1
        producer.poll(0)
    if producer.flush(60):
        raise RuntimeError("not everything was written within 60 s; see the broker's log")
    return num_events, num_bytes


def _rollout(number: int, tokens: int) -> Iterator[Record]:
    rng, name, group = np.random.default_rng(number), f"r{number:06d}", f"g{number // 8:06d}"
    now_ms = int(time.time() * 1000)
    yield RolloutOpened(name, 0, group, 8, "task", now_ms)
    half = tokens // CALLS // 2
    bases: dict[str, Any] = {}
    whole = np.empty(0, np.uint32)
    for turn in range(CALLS):
        whole = np.concatenate([whole, rng.integers(0, 150_000, half).astype(np.uint32)])
        prompt = encode_prompt(whole, bases)
        output = rng.integers(0, 150_000, half).astype(np.uint32)
        values = {field: getattr(_EXAMPLE, field) for field in ModelCall.__dataclass_fields__}
        values.update(
            call_id=f"{name}-{turn}", rollout_id=name, attempt=0, group_id=group, call_index=turn, prompt=prompt,
            output_ids=pack_ids(output), output_logprobs=pack_floats(np.full(half, -0.5, np.float32)),
            started_at_ms=now_ms, finished_at_ms=now_ms,
        )  # fmt: skip
        yield ModelCall(**values)
        whole = np.concatenate([whole, output])
        bases = {f"{name}-{turn}": whole}


def _example() -> ModelCall:
    import json
    from importlib.resources import files

    file = files("rollstream.schemas").joinpath("examples/calls/v1/first_call_whole_prompt.pass.json")
    return from_readable(ModelCall, json.loads(file.read_text("utf-8"))["value"])


_EXAMPLE = _example()


async def _read_aiokafka(kafka: KafkaSettings, events: int) -> None:
    codec, seen = Codec(), 0
    consumer = AIOKafkaConsumer(
        topics()["calls"].name(kafka.prefix), bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest",
        max_partition_fetch_bytes=4 << 20, fetch_max_wait_ms=100,
    )  # fmt: skip
    await consumer.start()
    while seen < events:
        for records in (await consumer.getmany(timeout_ms=500)).values():
            for record in records:
                codec.decode(record.value)
            seen += len(records)
    await consumer.stop()


def _read_confluent(kafka: KafkaSettings, events: int) -> None:
    codec, seen = Codec(), 0
    consumer = Consumer({**client_properties(kafka), "group.id": "plain", "enable.auto.commit": False})
    name = topics()["calls"].name(kafka.prefix)
    consumer.assign([TopicPartition(name, number, 0) for number in range(PARTITIONS)])
    while seen < events:
        for message in consumer.consume(500, 1):
            codec.decode(message.value())
            seen += 1
    consumer.close()


def _worker(kafka: KafkaSettings, folder: Path, events: int) -> ServiceProcess:
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_recovery",
        "--worker",
        kafka.bootstrap,
        kafka.prefix,
        str(events),
    ]
    return ServiceProcess("worker", command, log_file=folder / f"worker-{uuid.uuid4().hex[:6]}.log")


def _wait(worker: ServiceProcess) -> float:
    """Wait until everything is read and the gates are open. Returns: seconds since its first fetch."""
    worker.wait_until(lambda: CAUGHT_UP in worker.log_text(), _WAIT_S, "everything is read and the gates are open")
    return float(worker.log_text().split(CAUGHT_UP)[1].split()[0])


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


class WatchedShell(Shell):
    """Says when it has read everything with all gates open."""

    expected = 0
    """Events of `calls` there are."""
    _began_at: float | None = None
    _is_told = False

    def wanted(self, active: set[TP]) -> set[TP]:
        self._began_at = self._began_at or time.monotonic()
        return super().wanted(active)

    def passed(self, ends: Mapping[TP, End]) -> None:
        super().passed(ends)
        partitions = list(self._partitions.values())
        is_open = bool(partitions) and not any(partition.closed_gates for partition in partitions)
        if is_open and not self._is_told and self.stats.events["calls"] >= self.expected:
            self._is_told = True
            print(f"{CAUGHT_UP} {time.monotonic() - (self._began_at or 0):.3f} s", flush=True)


def run_worker(bootstrap: str, prefix: str, events: str) -> None:
    """The worker process: the stages that ship."""
    settings = Settings(
        kafka=KafkaSettings(bootstrap=bootstrap, prefix=prefix, partitions=PARTITIONS),
        processor=ProcessorSettings(instance_id="bench"),
    )
    pipeline = load_pipeline(settings.processor.pipeline)

    def make_shell() -> Shell:
        shell = WatchedShell(settings, pipeline.build_stages, Codec(), kinds=kinds_by_topic())
        shell.expected = int(events)
        return shell

    run_shell(settings, make_shell, STAGES)


if __name__ == "__main__":
    main()
