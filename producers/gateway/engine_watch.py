"""Notices that what turns messages into ids and ids into messages was changed under a policy that goes on.

Such a change makes samples of one policy differ for a reason that is not in its weights. Every record has the fingerprint that
its call was served under, so nothing is refused: it is logged and counted (`rollstream_gateway_engine_changes_total`).
"""

from __future__ import annotations

import logging

from rollstream.producers.engines.base import Identity
from rollstream.producers.gateway.metrics import GatewayMetrics

_log = logging.getLogger(__name__)


class EngineWatch:
    """Compares each call's engine with that of the call before. Args: policy: name of the policy that is served."""

    def __init__(self, policy: str, metrics: GatewayMetrics) -> None:
        self._policy = policy
        self._metrics = metrics
        self._last: Identity | None = None

    def see(self, identity: Identity) -> None:
        """A call is served by this engine."""
        last, self._last = self._last, identity
        if last is None or last is identity or last.fingerprint == identity.fingerprint:
            return
        self._metrics.engine_changes.inc()
        _log.error(
            "policy %r goes on with another tokenizer, chat template or parser: engine_fingerprint was %r (%s %s) and is "
            "%r (%s %s); give it another policy name (gateway.policy), or serve it as before",
            self._policy,
            last.fingerprint,
            last.engine,
            last.engine_version,
            identity.fingerprint,
            identity.engine,
            identity.engine_version,
        )
