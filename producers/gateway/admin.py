"""The routes of whoever runs rollouts: open them, publish weights, look after the process. They need the admin key.

    POST /rollouts      open a rollout
    POST /policies      load and announce weights
    GET  /health, /metrics, /stats

With `gateway.admin_port` they lie on a port of their own, out of an agent's reach; `/health` answers on both.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollstream.producers.gateway.keys import Keys
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.rollouts import RolloutService
from rollstream.producers.gateway.web import Handler, Refusals, headers_of, json_answer, object_of, read_body


class AdminRoutes:
    """See the module.

    Args: rollouts: the service, once the gateway has started. health: why the gateway cannot serve. stats: counters for people.
        public_url: the address that rollouts are told, from a request.
    """

    def __init__(
        self,
        rollouts: Callable[[], RolloutService],
        keys: Keys,
        refusals: Refusals,
        metrics: GatewayMetrics,
        *,
        stats: Callable[[], dict[str, object]],
        public_url: Callable[[Request], str],
        max_request_bytes: int,
    ) -> None:
        self._rollouts = rollouts
        self._keys = keys
        self._refusals = refusals
        self._counters = metrics
        self._stats_of = stats
        self._public_url = public_url
        self._max_request_bytes = max_request_bytes

    def routes(self) -> list[Route]:
        """The routes, without `/health`."""
        return [
            Route("/rollouts", self._guarded(self._open), methods=["POST"]),
            Route("/policies", self._guarded(self._policies), methods=["POST"]),
            Route("/stats", self._stats, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    def _guarded(self, handle: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            self._keys.check_admin(headers_of(request.scope["headers"]))
            return await handle(request)

        return self._refusals.answering(guarded)

    async def _body(self, request: Request) -> dict[str, object]:
        headers = headers_of(request.scope["headers"])
        return object_of(await read_body(request.receive, headers, self._max_request_bytes))

    async def _open(self, request: Request) -> Response:
        opened = await self._rollouts().open(await self._body(request))
        root = f"{self._public_url(request).rstrip('/')}{opened.path}"
        answer = {
            "rollout_id": opened.claims.rollout_id,
            "attempt": opened.claims.attempt,
            "group_id": opened.claims.group_id,
            "root_url": root,
            "base_url": f"{root}/v1",
            "api_key": opened.api_key,
        }
        return json_answer(answer, 201)

    async def _policies(self, request: Request) -> Response:
        record = await self._rollouts().publish_policy(await self._body(request))
        return json_answer({"policy": record.policy, "version": record.version})

    async def _stats(self, _: Request) -> Response:
        return json_answer(self._stats_of())

    async def _metrics(self, _: Request) -> Response:
        return Response(self._counters.text(), media_type="text/plain; version=0.0.4")
