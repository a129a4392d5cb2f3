"""Inference engines behind the gateway; `base.py` says what one is, `make_engine` makes the one that is set."""

from __future__ import annotations

from rollstream.producers.engines.base import Engine
from rollstream.settings import GatewaySettings


def make_engine(gateway: GatewaySettings) -> Engine:
    """The engine of the settings. Imports torch only for the local one."""
    if gateway.engine == "local":
        from rollstream.producers.engines.local import LocalEngine

        return LocalEngine.from_settings(gateway)
    if gateway.engine == "sglang":
        from rollstream.producers.engines.sglang import SglangEngine

        return SglangEngine(gateway)
    from rollstream.producers.engines.vllm import VllmEngine

    return VllmEngine(gateway)
