"""The topic `dead-letters` in Kafka: read to its end, and records written back to where they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rollstream.dead_letters import Filed, Refused, Selection, check_ids, select, sort_out
from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.kafka import check_broker, producer_properties
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import DeadLetter
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings
from rollstream.snapshot import bounds, open_reader, partition_counts, read_range

REDRIVEN_HEADER = "rs_redriven"
"""Header of a record that was written back: the id of its dead letter."""

_CLIENT = "rollstream-dlq"
_ACK_S = 60.0


class DeadLetterTopic:
    """The dead letters of a deployment."""

    def __init__(self, kafka: KafkaSettings, codec: Codec) -> None:
        self._kafka = kafka
        self._codec = codec
        self.unreadable = 0
        """Records of the topic that are no dead letters, as far as read."""

    def find(self, selection: Selection, *, with_values: bool = True) -> list[Filed]:
        """The selected dead letters that the topic holds now, oldest first.

        Args: with_values: False leaves the originals' bytes out, for a list of very many.
        Raises: BrokerError: the broker does not answer. SettingsError: an id names none, or several.
        """
        self.unreadable = 0
        found = select(
            (filed if with_values else filed.without_value() for filed in self._read() if selection.takes(filed)),
            selection,
        )
        check_ids(selection.ids, found)
        return found

    def sort_out(self, found: Sequence[Filed]) -> tuple[list[Filed], list[Refused]]:
        """Which of them can go back, and why the others cannot."""
        prefix = self._kafka.prefix
        expected = {t.name(prefix): t.partitions(self._kafka.partitions) for t in topics().values()}
        reader = open_reader(self._kafka, _CLIENT)
        try:
            return sort_out(found, prefix=prefix, expected=expected, there=partition_counts(reader, expected))
        finally:
            reader.close()

    def redrive(self, found: Sequence[Filed]) -> list[tuple[Filed, int]]:
        """Write the originals' keys and bytes to their topics and partitions, in the order in which they stood there.

        Returns: each with its new offset, once the broker has acknowledged all.
        Raises: BrokerError: it did not; what was acknowledged until then is said.
        """
        from confluent_kafka import Producer

        written: dict[str, int] = {}
        failed: list[str] = []

        def told(filed: Filed) -> Any:
            def on_delivery(error: object, message: Any) -> None:
                if error is None:
                    written[filed.letter.dead_letter_id] = message.offset()
                else:
                    failed.append(f"{filed.letter.dead_letter_id}: {error}")

            return on_delivery

        in_order = sorted(found, key=lambda filed: (filed.letter.topic, filed.letter.partition, filed.letter.offset))
        with boundary(BrokerError, f"write to {self._kafka.bootstrap}", reason="no_ack"):
            producer = Producer({**producer_properties(self._kafka, client_id=_CLIENT), "message.timeout.ms": 30_000})
            for filed in in_order:
                letter = filed.letter
                producer.produce(
                    letter.topic,
                    letter.value,
                    letter.key,
                    letter.partition,
                    on_delivery=told(filed),
                    headers=[(REDRIVEN_HEADER, letter.dead_letter_id.encode())],
                )
                producer.flush(_ACK_S)
        if failed or len(written) < len(in_order):
            raise BrokerError(
                f"cannot write back {len(in_order) - len(written)} of {len(in_order)} records "
                f"({'; '.join(failed[:3]) or 'no acknowledgement came'}); written: {', '.join(sorted(written)) or 'none'}. "
                "Do the others again: one that was written all the same is a repetition, which the stages drop",
                reason="no_ack",
            )
        return [(filed, written[filed.letter.dead_letter_id]) for filed in in_order]

    def _read(self) -> Iterator[Filed]:
        check_broker(self._kafka)
        name = topics()["dead-letters"].name(self._kafka.prefix)
        reader = open_reader(self._kafka, _CLIENT)
        try:
            partitions = partition_counts(reader, [name])
            if name not in partitions:
                raise BrokerError(
                    f"there is no topic {name}; see kafka.prefix, or run `rollstream topics apply`",
                    reason="topic_missing",
                )
            for partition, (first, end) in bounds(reader, name, partitions[name]).items():
                for message in read_range(reader, name, partition, first, end):
                    value = message.value or b""
                    try:
                        letter = self._codec.decode(value)
                    except SchemaError:
                        letter = None
                    if isinstance(letter, DeadLetter):
                        yield Filed(letter, len(letter.value), message.timestamp, partition, message.offset)
                    else:
                        self.unreadable += 1
        finally:
            reader.close()
