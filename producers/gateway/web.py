"""Small pieces of HTTP that every route needs: reading bodies and headers, JSON answers, refusals as answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rollstream.errors import BrokerError, ProviderError
from rollstream.producers.dialects.base import Problem, RequestRefused, Surface
from rollstream.producers.dialects.openai_errors import error_answer
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.refusals import engine_refusal, unacknowledged

Handler = Callable[[Request], Awaitable[Response]]
"""An endpoint of Starlette."""
AsgiCall = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""


class AsgiEndpoint:
    """Makes Starlette take a method for an ASGI application, which spares a Request and a Response per call."""

    def __init__(self, handle: AsgiCall) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


def headers_of(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """A scope's headers by name; servers give the names in lower case."""
    return dict(pairs)


def below_root(path: str) -> str:
    """A path without `/r/{rollout_id}/a/{attempt}`; a path that has no such start as it is."""
    parts = path.split("/", 5)
    return f"/{parts[5] if len(parts) > 5 else ''}" if parts[1:2] == ["r"] and parts[3:4] == ["a"] else path


def text_header(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    """A header's text; None where it was not sent."""
    value = headers.get(name)
    return None if value is None else value.decode("utf-8", "replace")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    """A request's body; a larger one is refused before it is read, or as soon as it has become too large.

    Raises: RequestRefused: 413, or the client left.
    """
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused("the client left before its request was whole")
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(limit_bytes: int) -> RequestRefused:
    return RequestRefused(
        f"the request has more than {limit_bytes} bytes; send less, or raise gateway.max_request_bytes",
        problem=Problem.TOO_LARGE,
        code="request_too_large",
    )


def json_answer(values: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(orjson.dumps(values), status, media_type="application/json")


def json_of(body: bytes) -> Any:
    """A body's JSON. Raises: RequestRefused."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise RequestRefused(f"the body is no JSON: {cause}", code="invalid_json") from cause


def object_of(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises: RequestRefused."""
    values = json_of(body)
    if not isinstance(values, dict):
        raise RequestRefused(f"the body is {type(values).__name__}, expected an object", code="invalid_json")
    return values


class Refusals:
    """Makes error answers, and counts them."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def answer(self, refusal: RequestRefused, surface: Surface | None = None) -> Response:
        """Args: surface: the protocol whose shape the error has; None for the gateway's own routes."""
        status, body = error_answer(refusal) if surface is None else surface.error(refusal)
        self.count(status)
        headers = {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s is not None else None
        return Response(body, status, headers=headers, media_type="application/json")

    async def send(self, send: Send, refusal: RequestRefused, surface: Surface) -> None:
        """Send an error answer."""
        response = self.answer(refusal, surface)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    def count(self, status: int) -> None:
        """An error was sent."""
        self._metrics.refused.labels(str(status)).inc()

    def answering(self, handle: Handler, surface: Surface | None = None) -> Handler:
        """An endpoint whose refusals become error answers."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestRefused as refusal:
                return self.answer(refusal, surface)
            except ProviderError as error:
                return self.answer(engine_refusal(error), surface)
            except BrokerError as error:
                return self.answer(unacknowledged(error), surface)

        return endpoint
