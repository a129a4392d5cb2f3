"""The gateway's own routes of a rollout, for its harness and environment: events, the end, and which models there are.

    POST /r/{rollout_id}/a/{attempt}/events     environment events
    POST /r/{rollout_id}/a/{attempt}/finish     the rollout's end
    GET  /r/{rollout_id}/a/{attempt}            answers that it is there; Claude Code asks before its first call

All but the last need the rollout's key. `client.py` is the other side.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollstream.producers.dialects import CATALOGS
from rollstream.producers.dialects.base import ModelCatalog
from rollstream.producers.gateway.keys import Keys
from rollstream.producers.gateway.rollouts import RolloutService
from rollstream.producers.gateway.web import (
    Handler,
    Refusals,
    below_root,
    headers_of,
    json_answer,
    json_of,
    object_of,
    read_body,
)

ROOT = "/r/{rollout_id}/a/{attempt:int}"
"""Where the routes of an attempt lie."""


class RolloutRoutes:
    """See the module. Args: rollouts: the service, once the gateway has started. models: names of what is served."""

    def __init__(
        self,
        rollouts: Callable[[], RolloutService],
        keys: Keys,
        refusals: Refusals,
        *,
        max_request_bytes: int,
        models: tuple[str, ...],
    ) -> None:
        self._rollouts = rollouts
        self._keys = keys
        self._refusals = refusals
        self._max_request_bytes = max_request_bytes
        self._models = models

    def routes(self) -> list[Route]:
        """The routes."""
        answering = self._refusals.answering
        paths = {path for catalog in CATALOGS for path in catalog.routes}
        return [
            Route(f"{ROOT}/events", answering(self._events), methods=["POST"]),
            Route(f"{ROOT}/finish", answering(self._finish), methods=["POST"]),
            Route(ROOT, self._is_there, methods=["GET"]),
            *(Route(f"{ROOT}{path}", self._catalog(path), methods=["GET"]) for path in sorted(paths)),
        ]

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.receive, headers_of(request.scope["headers"]), self._max_request_bytes)

    async def _events(self, request: Request) -> Response:
        claims = self._keys.claims(headers_of(request.scope["headers"]), request.path_params)
        event_ids = await self._rollouts().write_events(claims, json_of(await self._body(request)))
        return json_answer({"event_ids": event_ids})

    async def _finish(self, request: Request) -> Response:
        claims = self._keys.claims(headers_of(request.scope["headers"]), request.path_params)
        await self._rollouts().finish(claims, object_of(await self._body(request)))
        return json_answer({"rollout_id": claims.rollout_id, "attempt": claims.attempt})

    async def _is_there(self, _: Request) -> Response:
        return json_answer({})

    def _catalog(self, path: str) -> Handler:
        """The endpoint of a path that several protocols may share."""
        sharing = [catalog for catalog in CATALOGS if path in catalog.routes]

        async def endpoint(request: Request) -> Response:
            headers = headers_of(request.scope["headers"])
            below = below_root(request.url.path)
            catalog = next((one for one in sharing if one.is_mine(below, headers)), sharing[-1])

            async def answer(request: Request) -> Response:
                return self._models_of(catalog, request)

            return await self._refusals.answering(answer, catalog)(request)

        return endpoint

    def _models_of(self, catalog: ModelCatalog, request: Request) -> Response:
        self._keys.claims(headers_of(request.scope["headers"]), request.path_params, catalog.key_headers)
        model = request.path_params.get("model")
        body = catalog.listed(self._models) if model is None else catalog.described(model)
        return Response(body, media_type="application/json")
