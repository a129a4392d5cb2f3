"""What the gateway counts, for Prometheus and for `GET /stats`. Names start with `rollstream_gateway_`."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollstream.producers.call import DEFECTS
from rollstream.schemas.records import ModelCall, Outcome
from rollstream.schemas.types import unpack_ids

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight = 0
        self.started = 0
        self.outcomes: Counts[str] = Counts()
        calls = Counter("rollstream_gateway_calls", "Calls by outcome.", ["outcome"], registry=registry)
        self._calls = {outcome: calls.labels(outcome.value) for outcome in Outcome}
        defects = Counter("rollstream_gateway_defects", "Defects of calls by code.", ["code"], registry=registry)
        self._defects = {code: defects.labels(code) for code in DEFECTS}
        self._prompt = Counter("rollstream_gateway_prompt_tokens", "Prompt tokens.", registry=registry)
        self._output = Counter("rollstream_gateway_output_tokens", "Sampled tokens.", registry=registry)
        gauge = Gauge("rollstream_gateway_calls_in_flight", "Calls being served.", registry=registry)
        gauge.set_function(lambda: self.in_flight)
        self.engine_seconds = Histogram(
            "rollstream_gateway_engine_seconds", "Time in the engine's generate.", buckets=_SECONDS, registry=registry
        )
        self.ack_seconds = Histogram(
            "rollstream_gateway_ack_seconds",
            "Kafka's acknowledgement of an outcome.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "rollstream_gateway_refused", "Error answers by HTTP status.", ["status"], registry=registry
        )
        self.spooled = Counter(
            "rollstream_gateway_spooled", "Records put on disk since Kafka did not acknowledge.", registry=registry
        )
        self.events = Counter("rollstream_gateway_events", "Environment events written.", registry=registry)
        self.engine_changes = Counter(
            "rollstream_gateway_engine_changes",
            "Changes of tokenizer, template or parsers under one policy.",
            registry=registry,
        )
        self.version = Gauge("rollstream_gateway_policy_version", "Policy version served.", registry=registry)

    def call_finished(self, call: ModelCall) -> None:
        """A call's outcome was made."""
        self.outcomes[call.outcome.value] += 1
        self._calls[call.outcome].inc()
        self._prompt.inc(call.prompt.length)
        self._output.inc(len(unpack_ids(call.output_ids)))
        for code in call.defects:
            self._defects[code].inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)
