"""How a process of ours talks to Kafka: the settings as librdkafka properties.

Producers, sinks and trainers all start from `client_properties` and add what only they need. What a user gives under
`kafka.properties` (security, for instance) wins over all of it but the partitioner and the requests in flight.
"""

from __future__ import annotations

import time
from typing import Any

from rollstream.errors import BrokerError
from rollstream.schemas.topics import PARTITIONER
from rollstream.settings import MAX_VALUE_BYTES, KafkaSettings

_OF_PRODUCERS, _OF_CONSUMERS = ("enable.idempotence", "linger.ms"), ("fetch.min.bytes",)


def client_properties(kafka: KafkaSettings, *, client_id: str = "rollstream") -> dict[str, Any]:
    """The librdkafka properties of any client; what only a producer or a consumer understands is left out."""
    left_out = (*_OF_PRODUCERS, *_OF_CONSUMERS)
    properties = {name: value for name, value in kafka.properties.items() if name not in left_out}
    return {"bootstrap.servers": kafka.bootstrap, "client.id": client_id, **properties}


def producer_properties(
    kafka: KafkaSettings, *, client_id: str = "rollstream", linger_ms: float = 2
) -> dict[str, Any]:
    """The librdkafka properties of a producer that loses, doubles and reorders nothing.

    A message never expires in the queue: what was given to the producer stands in front of what comes later, however long
    the broker is away. So an outcome that was not acknowledged in time still precedes the correction about it.

    Args: linger_ms: how long a message waits for company; it is the floor of the acknowledgement's latency.
    """
    return {
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": linger_ms,
        "message.timeout.ms": 0,  # librdkafka: 0 is infinite
        "message.max.bytes": MAX_VALUE_BYTES,
        "reconnect.backoff.max.ms": 1_000,
        "compression.type": "none",  # packed ids of one call barely compress, and a batch is small
        **client_properties(kafka, client_id=client_id),
        **{name: value for name, value in kafka.properties.items() if name in _OF_PRODUCERS},
        # With more, a batch can overtake one that the broker refused as not yet the leader (a new topic, a leader that moves);
        # librdkafka then takes the earlier one for acknowledged with it, and it is lost.
        "max.in.flight.requests.per.connection": 1,
        "partitioner": PARTITIONER,  # nobody's choice: with another one a group's records would be spread
    }


def watermarks(consumer: Any, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
    """First offset that the log holds, and the one after its last.

    Right after a topic was made, or while a partition's leader moves, brokers answer that they are not the leader: asked
    again until `timeout_s`.

    Raises: BrokerError: no broker said it in time.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    moving = (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._TRANSPORT,
    )
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s)
        except KafkaException as error:
            if error.args[0].code() not in moving or time.monotonic() > deadline_s:
                raise BrokerError(
                    f"cannot tell what {topic} partition {partition} holds: {error}; see whether the topic is there and its "
                    "brokers are up",
                    reason="broker_down",
                ) from error
            time.sleep(0.1)
        else:
            return int(low), int(high)


def check_broker(kafka: KafkaSettings, timeout_s: float = 10.0) -> None:
    """Return if a broker answers; what starts without one would only fill its log.

    Raises: BrokerError: reason `broker_down`.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({**client_properties(kafka), "log_level": 0})
    try:
        admin.list_topics(timeout=timeout_s)
    except KafkaException as cause:
        raise BrokerError(
            f"no Kafka broker answers at kafka.bootstrap={kafka.bootstrap!r} within {timeout_s:g} s ({cause.args[0].str()}); "
            "start one, or set ROLLSTREAM_KAFKA__BOOTSTRAP",
            reason="broker_down",
        ) from cause
