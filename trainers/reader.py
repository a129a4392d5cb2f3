"""Whole groups of samples from Kafka, with a position that belongs to the trainer.

The reader assigns all partitions of the samples topic to itself: no consumer group, no rebalance, and what is in the trainer's
checkpoint is exactly where it goes on. Groups that are too old, have no spread or belong to another policy are skipped, and so
are revisions of groups; the next `record_step` says so. A record that cannot be read stops nobody: it is logged and counted,
and its group is skipped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from rollstream.errors import BrokerError, SchemaError, TrainerError, boundary
from rollstream.kafka import client_properties, producer_properties, watermarks
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import to_message
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import Consumption, GroupBuilt, Sample, SkippedGroup
from rollstream.schemas.registry import open_codec
from rollstream.schemas.topics import topics
from rollstream.settings import ClaimSettings, KafkaSettings
from rollstream.trainers.base import SampleGroup
from rollstream.trainers.groups import Complete, GroupAssembler, refusal

_log = logging.getLogger(__name__)

_FORMAT = 1
_FETCH_RECORDS = 500
_POLL_S = 0.2
_BROKER_S = 30.0
_READY_GROUPS = 64
_CLAIMS = ClaimSettings()


class SampleReader:
    """Reads groups and records steps. A context manager.

    Args:
        kafka: broker and topic prefix.
        trainer: name of the training run; the key of its consumption records.
        policy: only groups of this policy are handed out.
        version: the trainer's policy version at the start.
        max_staleness: groups whose oldest token is more versions behind than this are skipped; None takes all.
        skip_no_spread: skip groups in which every advantage is 0.
        revisions: hand out later revisions of a group, too; their earlier members come again with them.
        start: where to read from without a position: `earliest` or `latest`.
        claims: where large samples are; `claims` of the settings.
        codec: decodes and encodes records; None makes the one of the settings.
        clock_ms: UTC epoch milliseconds, for the time of consumption records.

    Raises: BrokerError: the broker does not answer, or the topic is not there.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        *,
        trainer: str,
        policy: str = "default",
        version: int = 0,
        max_staleness: int | None = None,
        skip_no_spread: bool = False,
        revisions: bool = False,
        start: str = "earliest",
        claims: ClaimSettings = _CLAIMS,
        codec: Codec | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        from confluent_kafka import Consumer, Producer

        self.version = version
        self.unreadable = 0
        """How many records could not be read so far."""
        self._trainer = trainer
        self._policy = policy
        self._max_staleness = max_staleness
        self._skip_no_spread = skip_no_spread
        self._revisions = revisions
        self._codec = codec or open_codec(kafka.registry_url, claims)
        self._clock_ms = clock_ms
        self._prefix = kafka.prefix
        self._topic = topics()["samples"].name(kafka.prefix)
        self._ready: deque[tuple[int, Complete]] = deque()
        self._skipped: dict[tuple[str, str], None] = {}
        """Group and reason, in order."""
        with boundary(BrokerError, f"read {self._topic} from {kafka.bootstrap}", reason="broker_down"):
            self._consumer = Consumer(
                {
                    "group.id": f"{kafka.prefix}.trainer.{trainer}",  # librdkafka wants one; nothing is committed
                    "enable.auto.commit": False,
                    "auto.offset.reset": "error",
                    "fetch.wait.max.ms": 100,
                    "queued.max.messages.kbytes": 65_536,
                    **client_properties(kafka, client_id=f"rollstream-trainer-{trainer}"),
                }
            )
            self._producer = Producer(producer_properties(kafka, client_id=f"rollstream-trainer-{trainer}"))
            self._partitions = self._find_partitions()
            self._assemblers = {partition: GroupAssembler(partition) for partition in self._partitions}
            self._assign({p: self._watermark(p)[0 if start == "earliest" else 1] for p in self._partitions})

    def next_groups(self, n: int, timeout_s: float) -> list[SampleGroup]:
        """Up to `n` groups, in the order in which they became whole; fewer if no more came in `timeout_s` seconds.

        Staleness is measured now, against `version`.
        Raises: BrokerError, TrainerError: reading cannot go on.
        """
        deadline_s = time.monotonic() + timeout_s
        found: list[SampleGroup] = []
        while len(found) < n:
            while self._ready and len(found) < n:
                group = self._accept(*self._ready.popleft())
                if group is not None:
                    found.append(group)
            left_s = deadline_s - time.monotonic()
            if len(found) >= n or left_s <= 0:
                break
            self._fetch(min(left_s, _POLL_S))
        return found

    def position(self) -> dict[str, Any]:
        """Where reading goes on after the groups that were handed out so far: JSON values for the checkpoint.

        Groups that are buffered and were not handed out are read again.
        """
        return {
            "format": _FORMAT,
            "topic": self._topic,
            "partitions": {str(p): assembler.position() for p, assembler in self._assemblers.items()},
            "skipped": [list(skipped) for skipped in self._skipped],
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from what `position` gave.

        Raises: TrainerError: it is of another topic or format, or the topic does not reach that far back or forth.
        """
        if position.get("format") != _FORMAT or position.get("topic") != self._topic:
            raise TrainerError(
                f"cannot seek: the position is of topic {position.get('topic')!r} and format {position.get('format')!r}, "
                f"expected {self._topic!r} and {_FORMAT}",
                reason="bad_position",
            )
        offsets: dict[int, int] = {}
        self._ready.clear()
        skipped = position["skipped"]
        pairs = (
            skipped.items() if isinstance(skipped, dict) else skipped
        )  # a dict where release 0.1 gave the position
        self._skipped = {(str(group_id), str(reason)): None for group_id, reason in pairs}
        for partition, assembler in self._assemblers.items():
            low, high = self._watermark(partition)
            there = position["partitions"].get(str(partition), {"offset": low, "done": []})
            if not low <= there["offset"] <= high:
                raise TrainerError(
                    f"cannot seek to offset {there['offset']} of {self._topic} partition {partition}: the log holds {low} to "
                    f"{high}; retention was faster or the topic was made anew: start without the position",
                    reason="position_gone",
                )
            offsets[partition] = assembler.seek(there)
        self._assign(offsets)

    def record_step(
        self,
        *,
        step: int,
        version_before: int,
        version_after: int,
        groups: Sequence[SampleGroup],
        checkpoint: str | None = None,
    ) -> str:
        """Write a `Consumption` and wait for its acknowledgement; from now on staleness counts from `version_after`.

        The same step over the same samples has the same id, so a step that is repeated after a crash counts once.

        Args:
            step: optimizer step (one batch), from 0.
            groups: the groups that were trained on.
            checkpoint: where the weights after the step are.

        Returns: the consumption's id.
        Raises: BrokerError: Kafka did not acknowledge in time; calling again is safe.
        """
        sample_ids = tuple(sample.sample_id for group in groups for sample in group.samples)
        record = Consumption(
            consumption_id=digest_json("consumption", self._trainer, step, sample_ids),
            trainer=self._trainer,
            step=step,
            policy=self._policy,
            version_before=version_before,
            version_after=version_after,
            sample_ids=sample_ids,
            group_ids=tuple(group.group_id for group in groups),
            skipped=tuple(SkippedGroup(group_id, reason) for group_id, reason in self._skipped),
            at_ms=self._clock_ms(),
            checkpoint=checkpoint,
        )
        self._send(record)
        self._skipped.clear()
        self.version = version_after
        return record.consumption_id

    def close(self) -> None:
        """Leave the broker."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self, partition: int, complete: Complete) -> SampleGroup | None:
        """The group, or None and a note why it is skipped."""
        self._assemblers[partition].take(complete.item)
        reason = refusal(
            complete,
            policy=self._policy,
            version=self.version,
            max_staleness=self._max_staleness,
            skip_no_spread=self._skip_no_spread,
            revisions=self._revisions,
        )
        if reason is None:
            return complete.to_group()
        self._skipped[complete.built.group_id, reason] = None
        return None

    def _fetch(self, timeout_s: float) -> None:
        room = _READY_GROUPS - len(self._ready)
        if room <= 0:
            return
        with boundary(BrokerError, f"read {self._topic}", reason="broker_down"):
            messages = self._consumer.consume(_FETCH_RECORDS, timeout_s)
        for message in messages:
            error = message.error()
            if error is not None:
                self._raise_if_final(error)
                continue
            partition, offset = cast(int, message.partition()), cast(int, message.offset())
            record = self._decode(partition, offset, message.value() or b"")
            if record is None:
                group_id = (message.key() or b"").decode(errors="replace")
                self._assemblers[partition].add_unreadable(offset, group_id)
                continue
            complete = self._assemblers[partition].add(offset, record)
            if complete is not None:
                self._ready.append((partition, complete))

    def _decode(self, partition: int, offset: int, value: bytes) -> Sample | GroupBuilt | None:
        """The record, or None and a line in the log."""
        try:
            record = self._codec.decode(value)
        except SchemaError as error:
            why = str(error)
        else:
            if isinstance(record, Sample | GroupBuilt):
                return record
            why = f"it is a {type(record).__name__}, expected a Sample or a GroupBuilt"
        self.unreadable += 1
        _log.error(
            "cannot use the record at %s partition %d offset %d, its group is skipped: %s; find out who wrote it, and rebuild "
            "the group",
            self._topic,
            partition,
            offset,
            why,
        )
        return None

    def _raise_if_final(self, error: Any) -> None:
        from confluent_kafka import KafkaError

        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise TrainerError(
                f"cannot read {self._topic}: the log does not hold the next offset any more ({error}); seek to a later position",
                reason="position_gone",
            )
        if error.fatal():
            raise BrokerError(f"cannot read {self._topic}: {error}", reason="broker_down")

    def _send(self, record: Consumption) -> None:
        message = to_message(record, self._codec, prefix=self._prefix, source=f"/trainer/{self._trainer}")
        failed: list[object] = []
        self._producer.produce(
            message.topic,
            message.value,
            key=message.key,
            timestamp=message.timestamp_ms,
            headers=list(message.headers),
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
        if self._producer.flush(_BROKER_S) or failed:
            why = failed[0] if failed else f"no acknowledgement in {_BROKER_S:g} s"
            raise BrokerError(
                f"cannot record step {record.step} of {self._trainer!r} in {message.topic}: {why}", reason="no_ack"
            )

    def _find_partitions(self) -> list[int]:
        metadata = self._consumer.list_topics(self._topic, timeout=_BROKER_S).topics[self._topic]
        if metadata.error is not None:
            raise BrokerError(
                f"cannot read {self._topic}: {metadata.error}; run `rollstream topics apply`, or look at kafka.prefix",
                reason="topic_missing",
            )
        return sorted(metadata.partitions)

    def _watermark(self, partition: int) -> tuple[int, int]:
        return watermarks(self._consumer, self._topic, partition, _BROKER_S)

    def _assign(self, offsets: Mapping[int, int]) -> None:
        from confluent_kafka import TopicPartition

        for partition, offset in offsets.items():
            self._assemblers[partition].skip_to(offset)
        self._consumer.assign(
            [TopicPartition(self._topic, partition, offset) for partition, offset in offsets.items()]
        )
