"""The gateway's HTTP: routes, keys, streams and disconnects. Everything else is in `service.py` and `rollouts.py`.

    POST /rollouts                                          open a rollout               admin key
    POST /policies                                          load and announce weights    admin key
    POST /r/{rollout_id}/a/{attempt}/v1/chat/completions    a model call                 the rollout's key
    GET  /r/{rollout_id}/a/{attempt}/v1/models              the served model             the rollout's key
    POST /r/{rollout_id}/a/{attempt}/events                 environment events           the rollout's key
    POST /r/{rollout_id}/a/{attempt}/finish                 the rollout's end            the rollout's key
    GET  /health, /metrics, /stats

The answer to a call starts only when the call is in Kafka. A stream that takes longer starts earlier and holds comment lines
until then; an error after that is an event in the stream, never an end.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from rollstream.errors import BrokerError, ProviderError
from rollstream.producers.base import Publisher
from rollstream.producers.capability import Claims, KeyRefused, verify_key
from rollstream.producers.dialects import chat as dialect
from rollstream.producers.dialects.chat import ChatRequest, RequestRefused
from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway.draft import Link, Served
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.refusals import engine_refusal
from rollstream.producers.gateway.rollouts import RolloutService, unacknowledged
from rollstream.producers.gateway.service import CallService
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.producers.spool import Spool
from rollstream.schemas.records import Delivery, PolicyVersion
from rollstream.settings import GatewaySettings

if TYPE_CHECKING:
    from rollstream.producers.policy_log import PolicyLog

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 5.0
"""A stream says that it lives this often; clients give up after tens of seconds of silence."""
_POLICY_WAIT_S = 1.0
"""Longest time that the end of the process waits for the reader of policies."""
_JSON = (b"content-type", b"application/json")
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


def wall_clock_ms() -> int:
    """UTC epoch milliseconds."""
    return time.time_ns() // 1_000_000


class Gateway:
    """The parts of a gateway, and its routes (`app`).

    Args:
        make_publisher: called inside the event loop, at start.
        policy_log: published policies, for an engine that must be told of them; None for one that keeps its weights itself.
        keep_alive_s, now_ms: for tests.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        engine: Engine,
        make_publisher: Callable[[], Publisher],
        *,
        policy_log: PolicyLog | None = None,
        keep_alive_s: float = _KEEP_ALIVE_S,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._make_publisher = make_publisher
        self._policy_log = policy_log
        self._keep_alive_s = keep_alive_s
        self._now_ms = now_ms
        if settings.key_secret is None:
            _log.warning("gateway.key_secret is not set: rollout keys are good until this process ends")
        self._secret = (settings.key_secret or secrets.token_hex(32)).encode()
        self._memory = MemoryOfRollouts()
        self._spool = Spool(settings.spool_dir)
        self._open_calls: set[asyncio.Task[Served]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self.metrics = GatewayMetrics()
        """What was counted."""
        self.app = Starlette(routes=self._routes(), lifespan=self._lifespan)
        """The ASGI application."""

    async def start(self) -> None:
        """Connect, and write what the spool holds before anything new. Called by the application's start."""
        self._publisher = self._make_publisher()
        replayed = self._spool.replay(self._publisher)
        if replayed:
            _log.warning("%d records of an earlier run are being written from %s", replayed, self._spool.folder)
        parts: dict[str, Any] = {"memory": self._memory, "metrics": self.metrics, "now_ms": self._now_ms}
        self._calls = CallService(self._settings, self._engine, self._publisher, spool=self._spool, **parts)
        self._rollouts = RolloutService(self._settings, self._engine, self._publisher, secret=self._secret, **parts)
        try:
            await self._engine.start()
        except ProviderError as error:
            _log.warning("the engine is not ready, calls get 503 until it is: %s", error)
        if self._policy_log is not None:
            await self._take_policy(self._policy_log.newest, self._settings.ack_timeout_s)
            self._following = asyncio.create_task(self._follow_policies(self._policy_log))

    async def stop(self) -> None:
        """Wait for outcomes on their way, then let go of everything. Called by the application's end."""
        for tasks in (self._open_calls, self._background):  # a call that was cut off goes on in the background
            if tasks:
                await asyncio.wait(tasks, timeout=self._settings.ack_timeout_s)
        if self._policy_log is not None:
            self._is_stopping = True
            await self._following
            await asyncio.to_thread(self._policy_log.close)
        await self._publisher.close(self._settings.ack_timeout_s)
        await self._engine.close()

    async def _follow_policies(self, log: PolicyLog) -> None:
        """Load what others publish."""
        while not self._is_stopping:
            if not await self._take_policy(log.wait, _POLICY_WAIT_S):
                await asyncio.sleep(_POLICY_WAIT_S)

    async def _take_policy(self, read: Callable[[float], PolicyVersion | None], timeout_s: float) -> bool:
        """Load the policy that `read` finds, if it is news. Returns: whether the log could be read."""
        try:
            record = await asyncio.to_thread(read, timeout_s)
            if record is not None and record not in self._rollouts.announced:
                await self._engine.load_policy(record.version, record.weights_ref)
                self.metrics.version.set(record.version)
                _log.info("serving version %d of policy %s", record.version, record.policy)
        except BrokerError as error:
            _log.warning("published policies are not known: %s", error)
            return False
        except ProviderError as error:
            _log.warning("a published policy is not served: %s", error)
        return True

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    def _routes(self) -> list[Route]:
        rollout = "/r/{rollout_id}/a/{attempt:int}"
        return [
            Route(f"{rollout}/v1/chat/completions", _AsgiEndpoint(self._chat), methods=["POST"]),
            Route(f"{rollout}/events", self._answering(self._events), methods=["POST"]),
            Route(f"{rollout}/finish", self._answering(self._finish), methods=["POST"]),
            Route(f"{rollout}/v1/models", self._answering(self._models), methods=["GET"]),
            Route("/rollouts", self._answering(self._open), methods=["POST"]),
            Route("/policies", self._answering(self._policies), methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/stats", self._stats, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    # ---------------------------------------------------------------- model calls

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            claims = self._claims(headers, scope["path_params"])
            request = dialect.parse_chat(await _body(receive))
        except RequestRefused as refusal:
            await self._send_refusal(send, refusal)
            return
        link = Link(
            harness=headers.get(b"user-agent", b"").decode("latin-1"),
            state_key=_header(headers, b"x-rollstream-state-key"),
            action_key=_header(headers, b"x-rollstream-action-key"),
        )
        call = asyncio.create_task(self._calls.run(claims, request, link))
        self._open_calls.add(call)
        call.add_done_callback(self._open_calls.discard)
        client = asyncio.create_task(_until_gone(receive))
        try:
            await self._answer(call, client, request, link, send)
        finally:
            client.cancel()
            if not (link.is_answered or link.is_gone):  # this process is being stopped, or the connection broke
                self._abandon(call, link)

    async def _answer(
        self, call: asyncio.Task[Served], client: asyncio.Task[None], request: ChatRequest, link: Link, send: Send
    ) -> None:
        has_begun = False
        silence_s = self._keep_alive_s if request.is_stream else None
        while True:
            await asyncio.wait((call, client), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                break
            if client.done():
                self._abandon(call, link)
                return
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
            await send(_part(dialect.KEEP_ALIVE))
        try:
            served = call.result()
        except RequestRefused as refusal:
            link.is_answered = True
            if has_begun:
                self.metrics.refused.labels(str(refusal.status)).inc()
                await send({"type": "http.response.body", "body": dialect.error_event(refusal)})
            else:
                await self._send_refusal(send, refusal)
            return
        link.is_answered = True
        if client.done():
            await self._calls.not_delivered(served, Delivery.NONE)
            return
        self._calls.delivering(served)
        body = _body_of(served, request)
        if not has_begun:
            headers = _STREAM if request.is_stream else (_JSON, (b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _abandon(self, call: asyncio.Task[Served], link: Link) -> None:
        """The client has left: stop the engine, and let the outcome be written without it."""
        link.is_gone = True
        if link.is_cancellable:
            call.cancel()

        async def see_through() -> None:
            try:
                served = await call
            except (RequestRefused, asyncio.CancelledError):
                return
            await self._calls.not_delivered(served, Delivery.NONE)

        task = asyncio.create_task(see_through())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---------------------------------------------------------------- everything else

    async def _open(self, request: Request) -> Response:
        self._check_admin(request)
        opened = await self._rollouts.open(_object(await request.body()))
        public = self._settings.public_url or f"{request.url.scheme}://{request.url.netloc}"
        answer = {
            "rollout_id": opened.claims.rollout_id,
            "attempt": opened.claims.attempt,
            "group_id": opened.claims.group_id,
            "base_url": f"{public.rstrip('/')}{opened.path}/v1",
            "api_key": opened.api_key,
        }
        return _json(answer, 201)

    async def _events(self, request: Request) -> Response:
        claims = self._claims(dict(request.scope["headers"]), request.path_params)
        event_ids = await self._rollouts.write_events(claims, _json_of(await request.body()))
        return _json({"event_ids": event_ids})

    async def _finish(self, request: Request) -> Response:
        claims = self._claims(dict(request.scope["headers"]), request.path_params)
        await self._rollouts.finish(claims, _object(await request.body()))
        return _json({"rollout_id": claims.rollout_id, "attempt": claims.attempt})

    async def _policies(self, request: Request) -> Response:
        self._check_admin(request)
        record = await self._rollouts.publish_policy(_object(await request.body()))
        return _json({"policy": record.policy, "version": record.version})

    async def _models(self, request: Request) -> Response:
        self._claims(dict(request.scope["headers"]), request.path_params)
        model = {"id": self._settings.model_name, "object": "model", "created": 0, "owned_by": "rollstream"}
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: Request) -> Response:
        problem = self._publisher.problem or await self._engine.health()
        return _json({"status": "ok"}) if problem is None else _json({"status": "failing", "problem": problem}, 503)

    async def _stats(self, _: Request) -> Response:
        metrics = self.metrics
        return _json(
            {
                "calls_started": metrics.started,
                "calls_finished": dict(metrics.outcomes),
                "calls_in_flight": metrics.in_flight,
                "policy_version": self._engine.version,
                "rollouts_remembered": len(self._memory),
                "spooled": len(self._spool.files()),
            }
        )

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _answering(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """An endpoint whose refusals become error answers."""

        async def endpoint(request: Request) -> Response:
            try:
                response: Response = await handle(request)
            except RequestRefused as refusal:
                return self._refusal(refusal)
            except ProviderError as error:
                return self._refusal(engine_refusal(error))
            except BrokerError as error:
                return self._refusal(unacknowledged(error))
            return response

        return endpoint

    def _claims(self, headers: dict[bytes, bytes], path: dict[str, Any]) -> Claims:
        try:
            return verify_key(
                _bearer(headers),
                self._secret,
                rollout_id=path["rollout_id"],
                attempt=path["attempt"],
                now_ms=self._now_ms(),
            )
        except KeyRefused as error:
            raise RequestRefused(
                str(error), status=401, kind="authentication_error", code="invalid_api_key"
            ) from error

    def _check_admin(self, request: Request) -> None:
        wanted = self._settings.admin_key
        given = _bearer(dict(request.scope["headers"]))
        if wanted is not None and not hmac.compare_digest(given.encode(), wanted.encode()):
            raise RequestRefused(
                "this needs the admin key: `Authorization: Bearer <gateway.admin_key>`",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )

    def _refusal(self, refusal: RequestRefused) -> Response:
        self.metrics.refused.labels(str(refusal.status)).inc()
        headers = {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s else None
        body = dialect.error_body(refusal)
        return Response(body, refusal.status, headers=headers, media_type="application/json")

    async def _send_refusal(self, send: Send, refusal: RequestRefused) -> None:
        response = self._refusal(refusal)
        await send({"type": "http.response.start", "status": refusal.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})


class _AsgiEndpoint:
    """Makes Starlette take a method for an ASGI application, which spares a Request and a Response per call."""

    def __init__(self, handle: Callable[[Scope, Receive, Send], Any]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


def _body_of(served: Served, request: ChatRequest) -> bytes:
    call = served.call
    usage = dialect.usage_of(call.prompt.length, len(call.output_ids) // 4)
    values: dict[str, Any] = {
        "call_id": call.call_id,
        "created_s": call.finished_at_ms // 1000,
        "model": call.model_served,
        "message": served.message,
        "finish_reason": call.finish_reason,
    }
    if request.is_stream:
        return dialect.stream_events(**values, usage=usage if request.wants_usage else None)
    return dialect.completion(**values, usage=usage)


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused("the client left before its request was whole")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _bearer(headers: dict[bytes, bytes]) -> str:
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")


def _header(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("utf-8", "replace")


def _json(values: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(values), status, media_type="application/json")


def _json_of(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise RequestRefused(f"the body is no JSON: {cause}", code="invalid_json") from cause


def _object(body: bytes) -> dict[str, Any]:
    values = _json_of(body)
    if not isinstance(values, dict):
        raise RequestRefused(f"the body is {type(values).__name__}, expected an object", code="invalid_json")
    return values
