"""`rollstream rebuild`: what is derived is made again from the log, with this or another pipeline, beside what is there.

Reads a snapshot: the ends that the topics have at the start. Partition numbers are built one after the other (`replay.py`), into
new topics or, through the command line, into a store. Nothing of what is there is touched: no position, no record.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rollstream.errors import BrokerError, SchemaError, SettingsError, boundary
from rollstream.kafka import check_broker, producer_properties
from rollstream.processors.pipeline import STAGES, Pipeline
from rollstream.processors.shell.admission import Admission, kinds_by_topic
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.replay import Replay, merged
from rollstream.processors.shell.stats import Stats
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import DeadLetter
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings, Settings
from rollstream.snapshot import Logged, bounds, open_reader, partition_counts, read_range
from rollstream.topic_admin import apply_topics

FIRST_STAGE = {"calls": "join", "rollouts": "group", "groups": "score"}
"""What `--from` may name → the stage that reads it first."""

_CLIENT = "rollstream-rebuild"
_FLUSH_S = 120.0
_PROGRESS_RECORDS = 500
_SHOWN = 10


class Target(Protocol):
    """Where a rebuild writes."""

    wants_inputs: bool
    """Whether it also takes what the rebuild reads, and what lies upstream of that."""

    def copy(self, record: Logged) -> None:
        """A record as it stands in the log."""

    def write(self, record: Logged) -> None:
        """A record that was made, with the place that it has in a topic that was empty."""

    def flush(self) -> None:
        """Return once everything is stored."""


@dataclass(slots=True)
class Report:
    """What a rebuild did."""

    read: Counter[str] = field(default_factory=Counter)
    """Topic noun → records read."""
    written: Counter[str] = field(default_factory=Counter)
    """Topic noun → records written."""
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(boundary, reason) → dead letters written."""
    groups: int = 0
    """Groups of which anything was read."""
    not_built: list[str] = field(default_factory=list)
    """Groups that have no samples, by name: open at the end of the log, or with nothing usable."""
    held: Counter[str] = field(default_factory=Counter)
    """Input noun → records that belong to what is still open, or to what a worker would bury half a minute later."""
    missing: list[str] = field(default_factory=list)
    """What the log does not hold any more."""

    def __str__(self) -> str:
        rows = [("topic", "read", "written")]
        for noun in topics():
            if self.read[noun] or self.written[noun]:
                rows.append((noun, str(self.read[noun] or "-"), str(self.written[noun] or "-")))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"{row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}" for row in rows]
        lines += [f"dead letters of {boundary}: {n} {reason}" for (boundary, reason), n in self.dead_letters.items()]
        held = ", ".join(f"{number} of {noun}" for noun, number in sorted(self.held.items()) if number)
        lines.append(f"groups: {self.groups}, {len(self.not_built)} of them without samples{_named(self.not_built)}")
        what = " (records held: of what has no end there, or lacks its other half)"
        lines.append(f"open at the end of the log: {held or 'nothing'}" + (what if held else ""))
        return "\n".join([*lines, *self.missing])


class NewTopics:
    """New topics under another prefix."""

    wants_inputs = False

    def __init__(self, kafka: KafkaSettings) -> None:
        """Args: kafka: with the new prefix, and as many partitions as the old topics have.

        Raises: BrokerError: one of the topics holds records already, or has another number of partitions.
        """
        from confluent_kafka import Producer

        self._failed: list[str] = []
        self._refuse_used(kafka)
        apply_topics(kafka)
        with boundary(BrokerError, f"connect to {kafka.bootstrap}", reason="broker_down"):
            # One request at a time. Of two that are under way to a partition made a moment ago the first may be refused and
            # the second taken; Kafka then holds the repeated first one for a duplicate, and it is lost though acknowledged.
            one_by_one = {"max.in.flight.requests.per.connection": 1}
            self._producer = Producer({**producer_properties(kafka, client_id=_CLIENT, linger_ms=20), **one_by_one})

    def copy(self, record: Logged) -> None:
        """Nothing: the inputs stand in the old topics."""

    def write(self, record: Logged) -> None:
        """Queue a record."""
        while True:
            try:
                self._producer.produce(
                    record.topic,
                    record.value,
                    record.key,
                    record.partition,
                    on_delivery=partial(self._delivered, record),
                    headers=list(record.headers),
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                break
        self._producer.poll(0)
        self._check()

    def flush(self) -> None:
        """Wait for the acknowledgements."""
        left = self._producer.flush(_FLUSH_S)
        self._check()
        if left:
            raise BrokerError(
                f"cannot write: {left} records have no acknowledgement after {_FLUSH_S:g} s", reason="no_ack"
            )

    def _delivered(self, record: Logged, error: object, message: Any) -> None:
        if error is not None:
            self._failed.append(str(error))
        elif message.offset() != record.offset:
            self._failed.append(
                f"{record.topic} partition {record.partition} took as offset {message.offset()} what belongs at "
                f"{record.offset}: something else writes there, or a record was lost"
            )

    def _check(self) -> None:
        if self._failed:
            raise BrokerError(
                f"cannot write: {self._failed[0]}; what was written is a part only: rebuild into another prefix",
                reason="no_ack",
            )

    def _refuse_used(self, kafka: KafkaSettings) -> None:
        with closing(open_reader(kafka, _CLIENT)) as reader:
            there = partition_counts(reader, [topic.name(kafka.prefix) for topic in topics().values()])
            for name, partitions in there.items():
                if any(end for _, end in bounds(reader, name, partitions).values()):
                    raise BrokerError(
                        f"cannot rebuild into prefix {kafka.prefix!r}: topic {name} has records already; take another prefix, or "
                        "delete its topics",
                        reason="target_used",
                    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to read."""

    partitions: int
    """Number of partitions."""
    inputs: dict[str, dict[int, tuple[int, int]]]
    """Input noun → partition → first offset and end."""
    upstream: tuple[str, ...]
    """Nouns that lie before the inputs."""
    stages: tuple[str, ...]
    """Stages that run again."""
    newest_ms: int
    """When anything was last appended to an input."""

    @property
    def records(self) -> int:
        """How many offsets there are."""
        return sum(end - first for found in self.inputs.values() for first, end in found.values())

    def missing(self) -> Iterator[str]:
        """What retention has deleted, in words."""
        for noun, found in self.inputs.items():
            for number, (first, _) in found.items():
                if first:
                    yield (
                        f"{noun} partition {number} begins at offset {first}: {first} records before it were deleted by "
                        "retention, and what needed them is not built, or went to the dead letters"
                    )


def take_snapshot(kafka: KafkaSettings, pipeline: Pipeline, start: str) -> Snapshot:
    """What a rebuild from `start` reads, as of now.

    Raises: SettingsError: `start` is no such topic. BrokerError: a topic is not there, or their partitions differ.
    """
    if start not in FIRST_STAGE:
        raise SettingsError(f"cannot rebuild from {start!r}: expected one of {', '.join(FIRST_STAGE)}")
    check_broker(kafka)
    stages = STAGES[STAGES.index(FIRST_STAGE[start]) :]
    all_stages = pipeline.build_stages(0)
    made = {stage.output for stage in all_stages if stage.name in stages}
    inputs = dict.fromkeys(n for stage in all_stages if stage.name in stages for n in stage.inputs if n not in made)
    before = dict.fromkeys(
        n for s in all_stages if s.name not in stages for n in (*s.inputs, s.output) if n not in inputs
    )
    names = {noun: topics()[noun].name(kafka.prefix) for noun in (*inputs, *before)}
    with closing(open_reader(kafka, _CLIENT)) as reader:
        counts = partition_counts(reader, names.values())
        if len(counts) < len(names) or len(set(counts.values())) > 1:
            raise BrokerError(
                f"cannot rebuild: expected the topics {', '.join(names.values())} with one number of partitions, found "
                f"{counts}; see kafka.prefix",
                reason="not_copartitioned",
            )
        partitions = next(iter(counts.values()))
        found = {noun: bounds(reader, names[noun], partitions) for noun in inputs}
        last = [
            message.timestamp
            for noun, of_noun in found.items()
            for number, (first, end) in of_noun.items()
            for message in read_range(reader, names[noun], number, max(end - 1, first), end)
        ]
    return Snapshot(partitions, found, tuple(before), stages, max(last, default=0))


def rebuild(
    settings: Settings,
    pipeline: Pipeline,
    snapshot: Snapshot,
    target: Target,
    codec: Codec,
    *,
    prefix: str,
    progress: Callable[[int], None] = lambda read: None,
) -> Report:
    """Run the stages over a snapshot.

    Args: prefix: of the topics that the made records belong to; progress: told how many inputs were read.
    Raises: BrokerError, SinkError: reading or writing failed. StageError: too many dead letters.
    """
    return asyncio.run(_Rebuild(settings, pipeline, snapshot, target, codec, prefix, progress).run())


class _Rebuild:
    def __init__(
        self,
        settings: Settings,
        pipeline: Pipeline,
        snapshot: Snapshot,
        target: Target,
        codec: Codec,
        prefix: str,
        progress: Callable[[int], None],
    ) -> None:
        self._kafka = settings.kafka
        self._pipeline = pipeline
        self._snapshot = snapshot
        self._target = target
        self._codec = codec
        self._prefix = prefix
        self._progress = progress
        self._guard = DeadLetterGuard(settings.processor.dead_letter_limit)
        self._admission = Admission(snapshot.partitions, kinds_by_topic())
        self._stats = Stats()
        self._report = Report(missing=list(snapshot.missing()))
        self._names = {noun: topics()[noun].name(self._kafka.prefix) for noun in snapshot.inputs}

    async def run(self) -> Report:
        if self._target.wants_inputs:
            self._copy_upstream()
        with ExitStack() as stack:
            readers = {noun: stack.enter_context(closing(open_reader(self._kafka, _CLIENT))) for noun in self._names}
            for number in range(self._snapshot.partitions):
                await self._build(number, readers)
                self._target.flush()
        self._report.dead_letters.update(self._stats.dead_letters)
        self._progress(self._report.read.total())
        return self._report

    async def _build(self, number: int, readers: dict[str, Any]) -> None:
        report, inputs = self._report, {noun: found[number] for noun, found in self._snapshot.inputs.items()}
        replay = Replay(
            number,
            [stage for stage in self._pipeline.build_stages(number) if stage.name in self._snapshot.stages],
            self._codec,
            topic_of=self._names,
            prefix=self._prefix,
            write=self._target.write,
            guard=self._guard,
            stats=self._stats,
            dead=report.written["dead-letters"],
            admission=self._admission,
            max_work=self._pipeline.max_concurrency,
        )
        try:
            replay.begin({noun: first for noun, (first, _) in inputs.items()})
            streams = {
                noun: read_range(readers[noun], self._names[noun], number, first, end)
                for noun, (first, end) in inputs.items()
            }
            for noun, message in merged(streams):
                if self._target.wants_inputs:
                    self._target.copy(message)
                await replay.read(noun, message)
                report.read[noun] += 1
                if report.read.total() % _PROGRESS_RECORDS == 0:
                    self._progress(report.read.total())
            await replay.end({noun: end for noun, (_, end) in inputs.items()}, self._snapshot.newest_ms)
        finally:
            replay.close()
        dead = replay.written.pop("dead-letters")
        report.written.update(replay.written)
        report.written["dead-letters"] = dead
        report.held.update(replay.held)
        report.groups += len(replay.groups)
        report.not_built += sorted(key.decode("utf-8", "backslashreplace") for key in replay.groups - replay.built)

    def _copy_upstream(self) -> None:
        """What the stages before the first one read, and what they put into the dead letters."""
        with closing(open_reader(self._kafka, _CLIENT)) as reader:
            for noun in (*self._snapshot.upstream, "dead-letters"):
                name = topics()[noun].name(self._kafka.prefix)
                partitions = partition_counts(reader, [name]).get(name, 0)
                for number, (first, end) in bounds(reader, name, partitions).items():
                    for message in read_range(reader, name, number, first, end):
                        if noun != "dead-letters" or self._is_upstream(message):
                            self._target.copy(message)

    def _is_upstream(self, message: Logged) -> bool:
        try:
            letter = self._codec.decode(message.value or b"")
        except SchemaError:
            return False
        if not isinstance(letter, DeadLetter):
            return False
        upstream = [topics()[noun].name(self._kafka.prefix) for noun in self._snapshot.upstream]
        is_of_earlier_stage = letter.boundary in STAGES and letter.boundary not in self._snapshot.stages
        return is_of_earlier_stage or letter.topic in upstream


def _named(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
