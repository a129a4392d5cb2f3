"""Counters of a sink process."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram


class SinkMetrics:
    """What a sink process shows at its Prometheus port.

    Args: registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.records = Counter("rollstream_sink_records", "Records stored.", registry=registry)
        self.rows = Counter("rollstream_sink_rows", "Rows stored.", registry=registry)
        self.skipped = Counter(
            "rollstream_sink_expired_records",
            "Records that the log had dropped before they were stored.",
            registry=registry,
        )
        self.busy = Counter("rollstream_sink_busy", "Times that the store could not take a write.", registry=registry)
        self.write_s = Histogram("rollstream_sink_write_seconds", "Duration of a write.", registry=registry)
        self.held = Gauge("rollstream_sink_held_bytes", "Bytes read and not stored.", registry=registry)
        self.age_s = Gauge(
            "rollstream_sink_age_seconds",
            "Age of the newest record of the last write, when it was stored.",
            registry=registry,
        )
