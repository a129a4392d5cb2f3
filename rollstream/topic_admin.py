"""Creates the topics, and refuses to go on over ones that differ.

The number of partitions decides where a group lives, so it is never changed in place: a new topic version is the way.
"""

from __future__ import annotations

from rollstream.errors import BrokerError, boundary
from rollstream.settings import MAX_RECORD_BYTES, KafkaSettings

_TIMEOUT_S = 30.0
_CONFIG = {
    # Retention counts from here: with the records' own times a replayed log would be deleted as it is written, and a producer
    # whose clock is ahead would be refused. Event times stand in the records.
    "message.timestamp.type": "LogAppendTime",
    "max.message.bytes": str(MAX_RECORD_BYTES),
}


def apply_topics(kafka: KafkaSettings) -> list[str]:
    """Create missing topics.

    Returns: a line a topic: what was done.
    Raises: BrokerError: the broker does not answer or refuses, or a topic has another number of partitions.
    """
    from confluent_kafka.admin import AdminClient, NewTopic

    from rollstream.kafka import check_broker, client_properties
    from rollstream.schemas.topics import topics

    lines = []
    check_broker(kafka)
    with boundary(BrokerError, f"apply topics at {kafka.bootstrap}", reason="broker_down"):
        admin = AdminClient(client_properties(kafka))
        found = admin.list_topics(timeout=_TIMEOUT_S).topics
        wanted = {topic.name(kafka.prefix): topic for topic in topics().values()}
        for name, topic in wanted.items():
            partitions = topic.partitions(kafka.partitions)
            if name in found and len(found[name].partitions) != partitions:
                raise BrokerError(
                    f"topic {name} has {len(found[name].partitions)} partitions, expected {partitions}; set "
                    "ROLLSTREAM_KAFKA__PARTITIONS to what is there, or use another ROLLSTREAM_KAFKA__PREFIX",
                    reason="partition_count",
                )
        missing = [
            NewTopic(
                name,
                num_partitions=topic.partitions(kafka.partitions),
                replication_factor=kafka.replication,
                config={**_CONFIG, "cleanup.policy": topic.cleanup, "retention.ms": str(topic.retention_ms)},
            )
            for name, topic in wanted.items()
            if name not in found
        ]
        created = admin.create_topics(missing, request_timeout=_TIMEOUT_S) if missing else {}
        for future in created.values():
            future.result()
        lines = [f"{name}: {'created' if name in created else 'there'}" for name in wanted]
    return lines
