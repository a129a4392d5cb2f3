"""What open rollouts cost: a worker's memory for each encoded byte it holds, and how long it takes to be back after SIGKILL.

A real broker, the real stages. Rollouts are opened and their calls written, none is finished; so the worker holds everything,
and reads everything again at its next start.

Beside it stands what it takes to re-read the same bytes once: the same client (aiokafka) on the same event loop with the same
settings, fetching every record and decoding it into its record class once, and nothing else. Both are timed from the first fetch,
in turns, and their processor time is told beside the wall clock, since on a busy machine only that compares. The same read with
confluent-kafka is there for comparison with C.

`python -m benchmarks.bench_recovery --full` holds 10,000 rollouts of 50,000 tokens, 3.1 GB, and takes a quarter of an hour; the
default is a twentieth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
OPENED_AHEAD_MS = 86_400_000
"""How far in the future the rollouts are opened, so that none expires meanwhile."""
FETCH: dict[str, int] = {
    "max_partition_fetch_bytes": 4 << 20, "fetch_max_bytes": 16 << 20, "fetch_max_wait_ms": 100, "max_poll_records": 1_000,
}  # fmt: skip
"""What `processors/shell` sets."""
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
        plain, compared, back, started_s, rss_bytes = [], [], [], [], []
        for _ in range(RESTARTS):
            plain.append(asyncio.run(_read_aiokafka(kafka, events)))
            compared.append(_read_confluent(kafka, events))
            began = time.monotonic()
            worker = stack.enter_context(_worker(kafka, folder, events))
            back.append(_wait(worker))
            started_s.append(time.monotonic() - began)
            rss_bytes.append(_rss_bytes(worker.pid) - idle_bytes)
            worker.kill()
    grown = median(rss_bytes) / encoded_bytes
    shape = f"{rollouts:,} open rollouts of {tokens:,} tokens, {events:,} events, {encoded_bytes / 1e6:,.0f} MB"
    wall = median(one.wall_s / other.wall_s for one, other in zip(back, plain, strict=True))
    processor = median(one.processor_s / other.processor_s for one, other in zip(back, plain, strict=True))
    report(
        "recovery",
        [
            _figure("plain read, aiokafka", plain, shape),
            _figure("plain read, confluent-kafka", compared),
            _figure(
                "worker, first fetch to gates open", back, f"{wall:.2f} x a plain read, {processor:.2f} x its processor time"
            ),
            _figure(
                "worker, start of the process to gates open", [Took(wall_s, 0) for wall_s in started_s],
                f"memory grows by {grown:.2f} bytes for each encoded byte, from {idle_bytes / 1e6:.0f} MB",
            ),
        ],
    )  # fmt: skip


class Took(NamedTuple):
    """How long something took."""

    wall_s: float
    """By the clock."""
    processor_s: float
    """Of this process, all its threads; 0 if not measured."""


class Watch:
    """Measures from where it is made."""

    def __init__(self) -> None:
        self._began = Took(time.monotonic(), time.process_time())

    def took(self) -> Took:
        """Until now."""
        return Took(time.monotonic() - self._began.wall_s, time.process_time() - self._began.processor_s)


def _figure(what: str, runs: list[Took], note: str = "") -> Figure:
    p50, p99 = np.percentile([run.wall_s for run in runs], [50, 99]) * 1e6
    processor_s = median(run.processor_s for run in runs)
    notes = [f"{processor_s:.2f} s of processor time"] if processor_s else []
    return Figure(what, len(runs), float(p50), float(p99), "; ".join([*notes, *([note] if note else [])]))


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
    yield RolloutOpened(name, 0, group, 8, "task", now_ms + OPENED_AHEAD_MS)
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


async def _read_aiokafka(kafka: KafkaSettings, events: int) -> Took:
    codec, seen = Codec(), 0
    name = topics()["calls"].name(kafka.prefix)
    consumer = AIOKafkaConsumer(name, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", **FETCH)
    await consumer.start()
    watch = Watch()
    while seen < events:
        for records in (await consumer.getmany(timeout_ms=500)).values():
            for record in records:
                codec.decode(record.value or b"")
            seen += len(records)
    took = watch.took()
    await consumer.stop()
    return took


def _read_confluent(kafka: KafkaSettings, events: int) -> Took:
    codec, seen = Codec(), 0
    consumer = Consumer({**client_properties(kafka), "group.id": "plain", "enable.auto.commit": False})
    name = topics()["calls"].name(kafka.prefix)
    watch = Watch()
    consumer.assign([TopicPartition(name, number, 0) for number in range(PARTITIONS)])
    while seen < events:
        for message in consumer.consume(500, 1):
            codec.decode(message.value() or b"")
            seen += 1
    took = watch.took()
    consumer.close()
    return took


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


def _wait(worker: ServiceProcess) -> Took:
    """Wait until everything is read and the gates are open. Returns: what that took since its first fetch."""
    worker.wait_until(lambda: CAUGHT_UP in worker.log_text(), _WAIT_S, "everything is read and the gates are open")
    wall_s, processor_s = worker.log_text().split(CAUGHT_UP)[1].split()[:2]
    return Took(float(wall_s), float(processor_s))


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


class WatchedShell(Shell):
    """Says when it has read everything with all gates open."""

    expected = 0
    """Events of `calls` there are."""
    _watch: Watch | None = None
    _is_told = False

    def wanted(self, active: set[TP]) -> set[TP]:
        self._watch = self._watch or Watch()
        return super().wanted(active)

    def passed(self, ends: Mapping[TP, End]) -> None:
        super().passed(ends)
        partitions = list(self._partitions.values())
        is_open = bool(partitions) and not any(partition.closed_gates for partition in partitions)
        if self._watch and is_open and not self._is_told and self.stats.events["calls"] >= self.expected:
            self._is_told = True
            print(CAUGHT_UP, *self._watch.took(), flush=True)


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
