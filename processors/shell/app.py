"""The Faust app around a `Shell`, without agents, tables or web server."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any, cast

import faust
from faust.types import TP
from yarl import URL

from rollstream.processors.shell.handler import Shell
from rollstream.processors.shell.security import broker_credentials
from rollstream.processors.shell.transport import Producer, Transport
from rollstream.settings import MAX_RECORD_BYTES, Settings

_LINGER_MS = 5.0


class ProcessorApp(faust.App):
    """Faust's app with the handler that its consumer gives records to."""

    handler: Shell
    """Who gets the records."""
    has_ended: asyncio.Event
    """Set when the process shall end."""
    is_idempotent: bool
    """Whether the producer is; the embedded broker refuses aiokafka's."""
    fetch_min_bytes: int
    """A broker answers a fetch when it has this much, or after a moment."""

    def _crash(self, reason: BaseException) -> None:
        super()._crash(reason)
        self.loop.call_soon_threadsafe(self.has_ended.set)  # the consumer's thread may be the one that crashes


def build_app(settings: Settings, shell: Shell, group: str) -> ProcessorApp:
    """The app; needs a running event loop.

    Args: group: the consumer group's id.
    Raises: SettingsError: security properties that Faust does not speak.
    """
    kafka = settings.kafka
    app = ProcessorApp(
        group,
        broker=[URL(f"kafka://{server.strip()}") for server in kafka.bootstrap.split(",")],
        broker_credentials=broker_credentials(kafka.properties),
        store="memory://",
        datadir=f"{tempfile.gettempdir()}/{group}-data",  # Faust makes one; nothing is ever in it
        web_enabled=False,
        key_serializer="raw",
        value_serializer="raw",
        consumer_group_instance_id=f"{group}.{settings.processor.instance_id}",
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=4 * 1024 * 1024,
        broker_session_timeout=kafka.session_timeout_ms / 1000,
        broker_heartbeat_interval=kafka.session_timeout_ms / 4000,
        broker_commit_interval=1.0,
        broker_max_poll_records=1000,
        producer_linger=float(kafka.properties.get("linger.ms", _LINGER_MS)) / 1000,
        producer_max_batch_size=262_144,
        producer_max_request_size=MAX_RECORD_BYTES,
        producer_request_timeout=60.0,
        stream_wait_empty=False,
        table_standby_replicas=1,  # with 0 Faust assigns round robin, and same-numbered partitions go apart
        topic_disable_leader=True,
        topic_allow_declare=False,
    )
    app.handler, app.has_ended = shell, asyncio.Event()
    app.is_idempotent = kafka.properties.get("enable.idempotence", "true").lower() == "true"
    app.fetch_min_bytes = int(kafka.properties.get("fetch.min.bytes", 1))
    shell.on_failure = app._crash
    app.transport = Transport(app.conf.broker_consumer, app)
    app.producer_transport = Transport(app.conf.broker_producer, app)
    app.topics.add(app.topic(*shell.topic_of.values(), key_serializer="raw", value_serializer="raw"))

    async def on_revoked(_app: Any, _revoked: set[TP], **_: Any) -> None:
        shell.revoked()

    async def on_assigned(_app: Any, assigned: set[TP], **_: Any) -> None:
        shell.assigned(assigned, {topic: app.consumer.topic_partitions(topic) for topic in shell.topic_of.values()})

    async def send() -> None:
        await shell.outbox.send_all(cast(Producer, app.producer))

    app.on_partitions_revoked.connect(cast(Any, on_revoked))
    app.on_partitions_assigned.connect(cast(Any, on_assigned))
    app.task(cast(Any, send))
    return app
