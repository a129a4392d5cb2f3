"""The shell's numbers for Prometheus: `rollstream_processor_*`, collected when asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollstream.processors.shell.handler import Shell

_PREFIX = "rollstream_processor_"


class ShellCollector:
    """Reads a shell's counts at scrape time."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        stats, views = self._shell.stats, self._shell.views
        yield _counter("events", "Events read.", "topic", stats.events)
        yield _counter("emitted", "Records acknowledged by the broker.", "stage", stats.emitted)
        yield _counter(
            "finished", "Events let go of without an output: duplicates, late copies.", "stage", stats.finished
        )
        yield _counter("dropped", "Outputs dropped because the log already had them.", "stage", stats.dropped)
        dead = CounterMetricFamily(f"{_PREFIX}dead_letters", "Dead letters.", labels=["boundary", "reason"])
        for (boundary, reason), value in list(stats.dead_letters.items()):
            dead.add_metric([boundary, reason], value)
        yield dead
        held = GaugeMetricFamily(f"{_PREFIX}held_events", "Events held by a stage.", labels=["topic", "partition"])
        lag = GaugeMetricFamily(f"{_PREFIX}lag_events", "Events not read yet.", labels=["topic", "partition"])
        oldest = GaugeMetricFamily(
            f"{_PREFIX}oldest_held_age_seconds", "Age of the oldest held event; it bounds what a restart reads again.",
            labels=["partition"],
        )  # fmt: skip
        for view in views:
            number = str(view.number)
            for noun, value in view.held.items():
                held.add_metric([noun, number], value)
            for noun, value in view.lag.items():
                lag.add_metric([noun, number], value)
            oldest.add_metric(
                [number], 0.0 if view.oldest_ms is None else max(time.time() - view.oldest_ms / 1000, 0.0)
            )
        yield from (held, lag, oldest)
        yield GaugeMetricFamily(f"{_PREFIX}partitions", "Assigned partition numbers.", len(views))


def serve_metrics(shell: Shell, port: int) -> None:
    """Serve the metrics over HTTP, from a thread."""
    registry = CollectorRegistry()
    registry.register(ShellCollector(shell))
    start_http_server(port, registry=registry)


def _counter(name: str, told: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"{_PREFIX}{name}", told, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family
