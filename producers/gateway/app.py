"""The gateway put together: services, routes, and the two applications that the process serves.

    public   /r/{rollout_id}/a/{attempt}/...    what agents and environments call, with a rollout's key
    admin    /rollouts, /policies, ...          whoever runs them; on the public port, too, unless `gateway.admin_port` is set

An agent's protocols are in `dialects/`, the HTTP of their calls in `calls.py`, and how a call is served in `service.py`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollstream.errors import ProviderError
from rollstream.producers.base import Publisher
from rollstream.producers.dialects import COUNTERS, DIALECTS, surface_of
from rollstream.producers.dialects.base import Problem, RequestRefused
from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway.admin import AdminRoutes
from rollstream.producers.gateway.calls import CallRoutes
from rollstream.producers.gateway.keys import Keys
from rollstream.producers.gateway.limits import Admission
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.policy_follower import PolicyFollower
from rollstream.producers.gateway.rollout_routes import ROOT, RolloutRoutes
from rollstream.producers.gateway.rollouts import RolloutService
from rollstream.producers.gateway.service import CallService
from rollstream.producers.gateway.web import AsgiEndpoint, Refusals, below_root, headers_of, json_answer
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.producers.spool import Spool
from rollstream.settings import GatewaySettings

if TYPE_CHECKING:
    from rollstream.producers.policy_log import PolicyLog

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 5.0
"""A stream says that it lives this often; clients give up after tens of seconds of silence."""


def wall_clock_ms() -> int:
    """UTC epoch milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Running:
    """What exists from the start to the stop."""

    publisher: Publisher
    calls: CallService
    rollouts: RolloutService
    follower: PolicyFollower | None


class Gateway:
    """The parts of a gateway, and its applications.

    Args:
        make_publisher: called inside the event loop, at start.
        policy_log: published policies, for an engine that must be told of them; None for one that keeps its weights itself.
        address: of the public port, to tell rollouts where `gateway.public_url` does not; None tells what the request came to.
        keep_alive_s, now_ms: for tests.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        engine: Engine,
        make_publisher: Callable[[], Publisher],
        *,
        policy_log: PolicyLog | None = None,
        address: str | None = None,
        keep_alive_s: float = _KEEP_ALIVE_S,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._make_publisher = make_publisher
        self._policy_log = policy_log
        self._address = address
        self._now_ms = now_ms
        if settings.key_secret is None:
            _log.warning("gateway.key_secret is not set: rollout keys are good until this process ends")
        self._secret = (settings.key_secret or secrets.token_hex(32)).encode()
        self._memory = MemoryOfRollouts()
        self._spool = Spool(settings.spool_dir)
        self._parts: _Running | None = None
        self._has_started = asyncio.Event()
        self.metrics = GatewayMetrics()
        """What was counted."""
        self._refusals = Refusals(self.metrics)
        keys = Keys(self._secret, settings.admin_key, now_ms)
        limit = {"max_request_bytes": settings.max_request_bytes}
        self._call_routes = CallRoutes(
            lambda: self._running.calls,
            keys,
            Admission(
                max_calls=settings.max_calls,
                max_backlog=settings.max_backlog,
                backlog=lambda: self._running.publisher.backlog,
            ),
            self._refusals,
            keep_alive_s=keep_alive_s,
            model=settings.model_name,
            **limit,
        )
        rollouts = RolloutRoutes(
            lambda: self._running.rollouts, keys, self._refusals, models=(settings.model_name,), **limit
        )
        admin = AdminRoutes(
            lambda: self._running.rollouts,
            keys,
            self._refusals,
            self.metrics,
            stats=self._stats,
            public_url=self._public_url,
            **limit,
        ).routes()
        health = Route("/health", self._health, methods=["GET"])
        public = [*self._protocol_routes(), *rollouts.routes(), health]
        handlers: dict[Any, Any] = {HTTPException: self._no_route}
        self.app = Starlette(
            routes=public if settings.admin_port is not None else [*public, *admin],
            lifespan=self._lifespan,
            exception_handlers=handlers,
        )
        """The application of the public port; its start and end are the gateway's."""
        self.admin = Starlette(routes=[*admin, health], lifespan=self._after_start, exception_handlers=handlers)
        """The application of the admin port; it starts when the other has."""

    @property
    def _running(self) -> _Running:
        if self._parts is None:
            raise RuntimeError("the gateway has not been started")
        return self._parts

    async def start(self) -> None:
        """Connect, and write what the spool holds before anything new. Called by the application's start."""
        publisher = self._make_publisher()
        replayed = self._spool.replay(publisher)
        if replayed:
            _log.warning("%d records of an earlier run are being written from %s", replayed, self._spool.folder)
        common: dict[str, Any] = {"memory": self._memory, "metrics": self.metrics, "now_ms": self._now_ms}
        calls = CallService(self._settings, self._engine, publisher, spool=self._spool, **common)
        rollouts = RolloutService(self._settings, self._engine, publisher, secret=self._secret, **common)
        follower = None
        if self._policy_log is not None:
            follower = PolicyFollower(self._policy_log, self._engine, self.metrics, rollouts.announced)
        self._parts = _Running(publisher, calls, rollouts, follower)
        try:
            await self._engine.start()
        except ProviderError as error:
            _log.warning("the engine is not ready, calls get 503 until it is: %s", error)
        if follower is not None:
            await follower.start(self._settings.ack_timeout_s)
        self._has_started.set()

    async def stop(self) -> None:
        """Wait for outcomes on their way, then let go of everything. Called by the application's end."""
        running = self._running
        await self._call_routes.drain(self._settings.ack_timeout_s)
        if running.follower is not None:
            await running.follower.stop()
        await running.publisher.close(self._settings.ack_timeout_s)
        await self._engine.close()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    @asynccontextmanager
    async def _after_start(self, _: Starlette) -> AsyncIterator[None]:
        await self._has_started.wait()
        yield

    def _protocol_routes(self) -> list[Route]:
        calls = self._call_routes
        found = [(path, calls.endpoint(dialect)) for dialect in DIALECTS.values() for path in dialect.routes]
        found += [(path, calls.count_endpoint(counter)) for counter in COUNTERS for path in counter.routes]
        return [Route(f"{ROOT}{path}", AsgiEndpoint(endpoint), methods=["POST"]) for path, endpoint in found]

    def _public_url(self, request: Request) -> str:
        """The address that rollouts are told."""
        return self._settings.public_url or self._address or f"{request.url.scheme}://{request.url.netloc}"

    async def _health(self, _: Request) -> Response:
        problem = self._running.publisher.problem or await self._engine.health()
        return (
            json_answer({"status": "ok"})
            if problem is None
            else json_answer({"status": "failing", "problem": problem}, 503)
        )

    def _stats(self) -> dict[str, object]:
        metrics = self.metrics
        return {
            "calls_started": metrics.started,
            "calls_finished": dict(metrics.outcomes),
            "calls_in_flight": metrics.in_flight,
            "policy_version": self._engine.version,
            "rollouts_remembered": len(self._memory),
            "spooled": len(self._spool.files()),
        }

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """A path or method that is not there, in the words of the protocol whose client asks."""
        is_method = isinstance(error, HTTPException) and error.status_code == 405
        refusal = RequestRefused(
            f"{request.method} {request.url.path} is not served here",
            problem=Problem.METHOD if is_method else Problem.NOT_FOUND,
            code="no_such_route",
        )
        headers = headers_of(request.scope["headers"])
        return self._refusals.answer(refusal, surface_of(below_root(request.url.path), headers))
