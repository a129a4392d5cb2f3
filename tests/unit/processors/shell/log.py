"""A Kafka of one partition number in memory: what a partition sends stands in a log that it can read again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollstream.processors.base import Stage
from rollstream.processors.shell.admission import Admission
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.messages import Outgoing
from rollstream.processors.shell.partition import Partition
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.records import Record

CODEC = Codec()


@dataclass(frozen=True)
class Message:
    """A consumed message."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass
class Log:
    """Topics, committed offsets, and the partition that reads them."""

    make_stages: Callable[[], list[Stage]]
    limit: float = 1.0
    admission: Admission | None = None
    codec: Codec = CODEC
    topics: dict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))
    committed: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    unacked: list[Outgoing] = field(default_factory=list)
    now_ms: int = 10_000

    def write(self, noun: str, record: Record) -> None:
        """Append a record as a producer does."""
        message = to_message(record, self.codec, prefix="t", source="/test", noun=noun)
        self._append(noun, message.timestamp_ms, message.key, message.value, message.headers)

    def write_bytes(self, noun: str, value: bytes | None) -> None:
        """Append anything."""
        self._append(noun, 1, b"k", value, ())

    def start(self) -> Partition:
        """A worker starts: fresh stages, reading from the committed offsets."""
        self.stages = self.make_stages()
        guard = DeadLetterGuard(self.limit)
        self.partition = Partition(0, self.stages, self.codec, prefix="t", guard=guard, admission=self.admission)
        self.unacked.clear()
        self.position = {noun: self.committed.get(noun, 0) for noun in self.partition.nouns}
        ends = {noun: len(self.topics[noun]) for noun in self.partition.own_outputs}
        self.partition.begin(self.position, ends, self.finished)
        return self.partition

    def read(self, noun: str, upto: int | None = None) -> None:
        """The worker reads a topic, to its end or before an offset."""
        upto = len(self.topics[noun]) if upto is None else upto
        self.partition.feed(noun, self.topics[noun][self.position[noun] : upto])
        self.position[noun] = max(self.position[noun], upto)
        at_end = self.position[noun] == len(self.topics[noun])
        self.partition.passed(noun, self.position[noun], self.now_ms if at_end else None)

    def read_all(self, *, ack: bool = True) -> None:
        """The worker reads and sends until nothing moves."""
        while True:
            for noun in self.partition.nouns:
                self.read(noun)
            if not self.send(ack=ack) and all(self.position[n] == len(self.topics[n]) for n in self.partition.nouns):
                return

    def send(self, *, ack: bool = True) -> int:
        """The broker takes what the partition wants to send. Returns: how many messages."""
        sent = len(self.partition.outbox)
        while self.partition.outbox:
            outgoing = self.partition.outbox.popleft()
            offset = self.take(outgoing)
            if ack:
                outgoing.on_ack(outgoing, offset)
            else:
                self.unacked.append(outgoing)
        return sent

    def take(self, outgoing: Outgoing) -> int:
        """The broker appends a message. Returns: its offset."""
        m = outgoing.message
        if m.claim is not None:
            self.codec.store(m.claim)
        noun = m.topic.split(".")[1]
        self._append(noun, m.timestamp_ms, m.key, m.value, m.headers)
        return len(self.topics[noun]) - 1

    def commit(self) -> None:
        """The worker commits."""
        marks = self.partition.marks()
        self.committed.update({noun: mark.offset for noun, mark in marks.items()})
        self.finished.update({noun: mark.finished for noun, mark in marks.items()})

    def values(self, noun: str) -> list[bytes | None]:
        """All values of a topic."""
        return [message.value for message in self.topics[noun]]

    def _append(
        self, noun: str, time_ms: int, key: bytes, value: bytes | None, headers: tuple[tuple[str, bytes], ...]
    ) -> None:
        log = self.topics[noun]
        log.append(Message(len(log), time_ms, key, value, headers))
