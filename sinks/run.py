"""Runs a sink as a process: `rollstream sink clickhouse|objects`.

SIGTERM and SIGINT end it after what was read is stored. Any number of processes may run: they share the partitions of the
consumer group `<prefix>.sink.<kind>`. The embedded ClickHouse takes one process only.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollstream.errors import BrokerError, SettingsError, boundary
from rollstream.kafka import check_broker, client_properties
from rollstream.schemas.codec import Codec
from rollstream.schemas.registry import open_codec
from rollstream.schemas.topics import topics
from rollstream.settings import KafkaSettings, Settings
from rollstream.sinks.base import Sink
from rollstream.sinks.chunks import Chunker
from rollstream.sinks.commits import Commits
from rollstream.sinks.loop import SinkLoop
from rollstream.sinks.metrics import SinkMetrics

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

log = logging.getLogger(__name__)

KINDS = ("clickhouse", "objects")
_TOPICS_S = 120.0
_INSERT_S = 60  # the consumer is not polled while an insert waits: far below max.poll.interval.ms


def run_sink(settings: Settings, kind: str) -> None:
    """Copy every topic into a store until SIGTERM.

    Args: kind: `clickhouse` or `objects`.
    Raises: SettingsError, SinkError, BrokerError: it cannot start or go on.
    """
    check_broker(settings.kafka)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if settings.sink.metrics_port:
        from prometheus_client import start_http_server

        start_http_server(settings.sink.metrics_port)
    codec = open_codec(settings.kafka.registry_url, settings.claims)
    sink = open_sink(settings, kind, codec)
    try:
        consume(settings, kind, sink, stop, codec=codec)
    finally:
        sink.close()


def consume(
    settings: Settings,
    kind: str,
    sink: Sink,
    stop: threading.Event,
    metrics: SinkMetrics | None = None,
    codec: Codec | None = None,
) -> None:
    """Feed a sink from Kafka until `stop` is set. Args: codec: the sink's, which knows the registry's ids."""
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

    names = [topic.name(settings.kafka.prefix) for topic in topics().values()]
    admin = AdminClient(client_properties(settings.kafka, client_id=f"rollstream-sink-{kind}"))
    wait_for_topics(admin, names, stop)
    max_age_s = settings.sink.objects_max_age_s if kind == "objects" else settings.sink.max_age_s
    commits = Commits()
    loop = SinkLoop(
        consumer := Consumer({**consumer_properties(settings.kafka, kind), "on_commit": commits.answered}),
        sink,
        Chunker(settings.sink.chunk_records, max_age_s, claimed_bytes=(codec or Codec()).claimed_bytes),
        lambda: topic_ids(admin, names),
        metrics or SinkMetrics(),
        commits,
    )
    try:
        with boundary(BrokerError, f"read topics from {settings.kafka.bootstrap}", reason="broker_down"):
            loop.run(names, stop.is_set)
    finally:
        consumer.close()


def open_sink(settings: Settings, kind: str, codec: Codec | None = None) -> Sink:
    """The sink of a kind.

    Args: codec: what it reads records with; None for that of the settings.
    Raises: SettingsError: there is none. SinkError: the store cannot be opened.
    """
    codec = codec or open_codec(settings.kafka.registry_url, settings.claims)
    if kind == "clickhouse":
        from rollstream.sinks.clickhouse import ClickHouseSink
        from rollstream.sinks.connect import connect

        return ClickHouseSink(connect(settings.sink.clickhouse, timeout_s=_INSERT_S), codec)
    if kind == "objects":
        from rollstream.object_store import open_store
        from rollstream.sinks.objects import ObjectSink

        return ObjectSink(open_store(settings.sink.objects, settings.sink.s3), codec)
    raise SettingsError(f"no sink is called {kind!r}, expected one of {', '.join(KINDS)}")


def consumer_properties(kafka: KafkaSettings, kind: str) -> dict[str, object]:
    """The librdkafka properties of a sink's consumer."""
    return {
        "group.id": f"{kafka.prefix}.sink.{kind}",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",  # the loop starts where the store says, and tells what retention took
        "session.timeout.ms": kafka.session_timeout_ms,
        "max.poll.interval.ms": 600_000,
        "queued.max.messages.kbytes": 32_768,
        # A sink gathers for seconds anyway: asked for what came meanwhile, brokers answer a tenth as often.
        "fetch.wait.max.ms": 500,
        "fetch.min.bytes": kafka.properties.get("fetch.min.bytes", 256 * 1024),
        "partition.assignment.strategy": "range",
        **client_properties(kafka, client_id=f"rollstream-sink-{kind}"),
    }


def wait_for_topics(
    admin: AdminClient, names: Sequence[str], stop: threading.Event, timeout_s: float = _TOPICS_S
) -> None:
    """Return once all topics are there.

    Raises: BrokerError: some are still missing after `timeout_s`.
    """
    waited_s = 0.0
    while not stop.is_set():
        with boundary(BrokerError, "list topics", reason="broker_down"):
            missing = sorted(set(names) - set(admin.list_topics(timeout=30).topics))
        if not missing:
            return
        if waited_s >= timeout_s:
            raise BrokerError(
                f"cannot read topics: {', '.join(missing)} are not there after {timeout_s:g} s; run `rollstream topics apply`",
                reason="topic_missing",
            )
        waited_s += 0.5
        stop.wait(0.5)


def topic_ids(admin: AdminClient, names: Sequence[str]) -> Mapping[str, str]:
    """The broker's ids of topics, by name; none for a broker older than them.

    Raises: BrokerError: it did not answer. To go on without ids would mean to start at the beginning.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    found: dict[str, str] = {}
    for name, future in admin.describe_topics(TopicCollection(list(names)), request_timeout=30).items():
        try:
            found[name] = str(future.result().topic_id)
        except KafkaException as error:
            if error.args[0].code() not in (KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE):
                raise BrokerError(f"cannot describe topic {name}: {error}", reason="broker_down") from error
            log.warning("the broker has no topic ids: a topic that is made anew will not be noticed")
            return {}
    return found
