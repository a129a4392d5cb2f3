"""The watch over what the engine is."""

from __future__ import annotations

import logging

import pytest

from rollstream.producers.gateway.engine_watch import EngineWatch
from rollstream.producers.gateway.metrics import GatewayMetrics
from tests.unit.producers.fakes import identity


@pytest.mark.parametrize(("second", "alarms"), [("one", 0), ("two", 1), ("", 1)])
def test_change_of_the_fingerprint_is_logged_and_counted_once(
    caplog: pytest.LogCaptureFixture, second: str, alarms: int
) -> None:
    """Equal fingerprints of a server that was asked again are no change; another one is, and is then the one to compare with."""
    metrics = GatewayMetrics()
    watch = EngineWatch("writer", metrics)

    with caplog.at_level(logging.ERROR):
        watch.see(identity(fingerprint="one"))
        watch.see(identity(fingerprint=second))
        watch.see(identity(fingerprint=second))

    assert f"rollstream_gateway_engine_changes_total {float(alarms)}" in metrics.text().decode()
    assert alarms == len(caplog.records)
    assert all("'writer'" in record.getMessage() and "'one'" in record.getMessage() for record in caplog.records)
