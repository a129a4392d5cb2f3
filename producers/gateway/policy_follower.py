"""Has an engine that keeps its weights in this process serve what was last published, at a start and afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from rollstream.errors import BrokerError, ProviderError
from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.schemas.records import PolicyVersion

if TYPE_CHECKING:
    from rollstream.producers.policy_log import PolicyLog

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
"""Longest time that the end of the process waits for the reader of policies."""


class PolicyFollower:
    """Loads published policies. Args: own: versions that this process published itself; its engine has them already."""

    def __init__(
        self, log: PolicyLog, engine: Engine, metrics: GatewayMetrics, own: Collection[PolicyVersion]
    ) -> None:
        self._log = log
        self._engine = engine
        self._metrics = metrics
        self._own = own
        self._is_stopping = False

    async def start(self, timeout_s: float) -> None:
        """Load the newest policy, then follow in the background. Args: timeout_s: for reading the topic to its end."""
        await self._take(self._log.newest, timeout_s)
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop following."""
        self._is_stopping = True
        await self._task
        await asyncio.to_thread(self._log.close)

    async def _follow(self) -> None:
        while not self._is_stopping:
            if not await self._take(self._log.wait, _WAIT_S):
                await asyncio.sleep(_WAIT_S)

    async def _take(self, read: Callable[[float], PolicyVersion | None], timeout_s: float) -> bool:
        """Load the policy that `read` finds, if it is news. Returns: whether the log could be read."""
        try:
            record = await asyncio.to_thread(read, timeout_s)
            if record is not None and record not in self._own:
                await self._engine.load_policy(record.version, record.weights_ref)
                self._metrics.version.set(record.version)
                _log.info("serving version %d of policy %s", record.version, record.policy)
        except BrokerError as error:
            _log.warning("published policies are not known: %s", error)
            return False
        except ProviderError as error:
            _log.warning("a published policy is not served: %s", error)
        return True
