"""The HTTP of model calls, whatever their protocol: key, place, body, then the answer once the outcome is in Kafka.

A plain answer starts only then. A stream that takes longer starts earlier and holds signs of life until then; an error after
that is an event in the stream, never an end. A client that leaves stops the engine, and its outcome is written without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Message, Receive, Scope, Send

from rollstream.producers.dialects.base import Dialect, Exchange, Incoming, RequestRefused, Stream, TokenCounter
from rollstream.producers.gateway.keys import Keys
from rollstream.producers.gateway.limits import Admission
from rollstream.producers.gateway.service import CallService
from rollstream.producers.gateway.ticket import Link, Served, Ticket
from rollstream.producers.gateway.web import AsgiCall, Refusals, headers_of, read_body, text_header
from rollstream.schemas.records import Delivery

_JSON = (b"content-type", b"application/json")


class CallRoutes:
    """Answers model calls; one for a gateway process.

    Args: calls: the service, once the gateway has started. keep_alive_s: a stream says that it lives this often.
    """

    def __init__(
        self,
        calls: Callable[[], CallService],
        keys: Keys,
        admission: Admission,
        refusals: Refusals,
        *,
        max_request_bytes: int,
        keep_alive_s: float,
        model: str,
    ) -> None:
        self._calls = calls
        self._keys = keys
        self._admission = admission
        self._refusals = refusals
        self._max_request_bytes = max_request_bytes
        self._keep_alive_s = keep_alive_s
        self._model = model
        self._open: set[asyncio.Task[Served]] = set()
        self._background: set[asyncio.Task[None]] = set()

    async def drain(self, timeout_s: float) -> None:
        """Wait for outcomes on their way; a call that was cut off goes on in the background."""
        for tasks in (self._open, self._background):
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_s)

    def endpoint(self, dialect: Dialect) -> AsgiCall:
        """The ASGI application of a protocol's calls."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            headers = headers_of(scope["headers"])
            try:
                with self._admission.place():
                    claims = self._keys.claims(headers, scope["path_params"], dialect.key_headers)
                    body = await read_body(receive, headers, self._max_request_bytes)
                    exchange = dialect.parse(_incoming(scope, headers, body))
                    ticket = self._calls().arrive(claims, dialect, exchange.request, _link(headers))
                    await self._serve(ticket, exchange, receive, send)
            except RequestRefused as refusal:
                await self._refusals.send(send, refusal, dialect)

        return call

    def count_endpoint(self, counter: TokenCounter) -> AsgiCall:
        """The ASGI application of a protocol's token counts."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            headers = headers_of(scope["headers"])
            try:
                with self._admission.place():
                    claims = self._keys.claims(headers, scope["path_params"], counter.key_headers)
                    body = await read_body(receive, headers, self._max_request_bytes)
                    conversation = counter.parse(_incoming(scope, headers, body))
                    answer = counter.counted(await self._calls().count(claims, conversation))
            except RequestRefused as refusal:
                await self._refusals.send(send, refusal, counter)
                return
            await _send_whole(send, answer, ())

        return count

    async def _serve(self, ticket: Ticket, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Raises: RequestRefused: the call failed, and nothing was sent yet."""
        link = ticket.link
        call = asyncio.create_task(self._calls().run(ticket))
        self._open.add(call)
        call.add_done_callback(self._open.discard)
        client = asyncio.create_task(_until_gone(receive))
        try:
            await self._answer(call, client, ticket, exchange, send)
        finally:
            client.cancel()
            if not (link.is_answered or link.is_gone):  # this process is being stopped, or the connection broke
                self._abandon(call, link)

    async def _answer(
        self, call: asyncio.Task[Served], client: asyncio.Task[None], ticket: Ticket, exchange: Exchange, send: Send
    ) -> None:
        link, begun, stream = ticket.link, False, None
        if exchange.request.is_stream:
            stream = exchange.stream(ticket.call_id, ticket.arrived_at_ms // 1000, self._model)
        while True:
            silence_s = None if stream is None else self._keep_alive_s
            await asyncio.wait((call, client), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                break
            if client.done():
                self._abandon(call, link)
                return
            if stream is not None:
                if not begun:
                    begun = True
                    await send(_stream_start(stream, ticket))
                await send({"type": "http.response.body", "body": stream.keep_alive(), "more_body": True})
        try:
            served = call.result()
        except RequestRefused as refusal:
            link.is_answered = True
            if stream is None or not begun:
                raise
            self._refusals.count(ticket.dialect.error(refusal)[0])
            await send({"type": "http.response.body", "body": stream.fail(refusal)})
            return
        link.is_answered = True
        if client.done():
            await self._calls().not_delivered(served, Delivery.NONE)
            return
        self._calls().delivering(served)
        is_sent = False
        try:
            if stream is None:
                await _send_whole(send, exchange.whole(served.shown()), _ids(ticket))
            else:
                if not begun:
                    await send(_stream_start(stream, ticket))
                await send({"type": "http.response.body", "body": stream.end(served.shown())})
            is_sent = True
        finally:
            if not is_sent:
                self._see_to(self._calls().not_delivered(served, Delivery.PARTIAL))

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
            await self._calls().not_delivered(served, Delivery.NONE)

        self._see_to(see_through())

    def _see_to(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in the background; the end of the process waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _incoming(scope: Scope, headers: Mapping[bytes, bytes], body: bytes) -> Incoming:
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    return Incoming(body, headers, scope["path_params"], query)


def _link(headers: Mapping[bytes, bytes]) -> Link:
    tries = headers.get(b"x-stainless-retry-count", b"")
    return Link(
        is_retry=tries.isdigit() and int(tries) > 0,
        harness=headers.get(b"user-agent", b"").decode("latin-1"),
        state_key=text_header(headers, b"x-rollstream-state-key"),
        action_key=text_header(headers, b"x-rollstream-action-key"),
    )


def _ids(ticket: Ticket) -> tuple[tuple[bytes, bytes], ...]:
    """The call's id in the headers where the clients of OpenAI and of Anthropic look for it."""
    call_id = ticket.call_id.encode()
    return (b"x-request-id", call_id), (b"request-id", call_id)


def _stream_start(stream: Stream, ticket: Ticket) -> Message:
    headers = ((b"content-type", stream.media_type.encode()), (b"cache-control", b"no-cache"), *_ids(ticket))
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_whole(send: Send, body: bytes, more: tuple[tuple[bytes, bytes], ...]) -> None:
    headers = (_JSON, (b"content-length", str(len(body)).encode()), *more)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
