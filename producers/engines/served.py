"""What engines behind HTTP have in common: the questions at the start, streams, the gate around weight updates, the version.

A server may be restarted as another one at any time, so whatever broke off is asked again before the next call. While this
process changes the weights, calls wait at a gate, and those that run are told how they were paused.

The version is asked for: before and after every call while answers bring no spans, since then it is all there is, and at most
once in `_FRESH_S` where they do, since then it is a cross-check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import orjson

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Identity, Ids
from rollstream.producers.engines.http import Answered, EngineGone, EngineHttp
from rollstream.schemas.records import SamplingParams
from rollstream.settings import GatewaySettings

_log = logging.getLogger(__name__)
_HEALTH_S = 5.0
_FRESH_S = 1.0
"""A version that was asked for so long ago is asked for again."""


class HttpEngine(ABC):
    """An inference server; see the module. Args: http: for tests."""

    title: ClassVar[str]
    """The server's name in messages."""
    supported: ClassVar[str]
    """Its versions that are known to answer as expected."""

    def __init__(self, gateway: GatewaySettings, *, http: EngineHttp | None = None) -> None:
        self._model = gateway.model_name
        self._parser = gateway.tool_parser
        self._timeout_s = gateway.engine_timeout_s
        self._url = gateway.engine_url
        self._http = http or EngineHttp(self._url, gateway.engine_timeout_s)
        self._admin_url = gateway.engine_admin_url
        self._pause_mode = gateway.engine_pause_mode
        self._identity: Identity | None = None
        self._is_probed = False
        self._probing = asyncio.Lock()
        self._version: int | None = None
        self._asked_at_s = 0.0
        self._has_spans = False
        self._loading = asyncio.Lock()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._sampling: dict[int, Answer] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def version(self) -> int | None:
        """As in `Engine`: what the server said last, in an answer or when it was asked."""
        return self._version

    def identity(self) -> Identity:
        """As in `Engine`."""
        if self._identity is None:
            raise ProviderError(f"{self.title} was never reached", reason="engine_down")
        return self._identity

    async def start(self) -> None:
        """As in `Engine`; asks again after the server could not be reached, for it may have become another."""
        if not self._is_probed:
            async with self._probing:
                if not self._is_probed:
                    async with self._answers("the questions at the start"):
                        self._identity = await self._probe()
                    self._is_probed = True
        if not self._has_spans or time.monotonic() - self._asked_at_s > _FRESH_S:
            await self._refresh()

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        """As in `Engine`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._is_open.wait()
                answer.served = self._identity
                path, body = self._request(prompt_ids, sampling, request_id)
                self._sampling[id(answer)] = answer
                self._is_idle.clear()
                try:
                    async with self._answers(path), aclosing(self._events(path, body)) as events:
                        async for event in events:
                            self._take(event, answer)
                finally:
                    del self._sampling[id(answer)]
                    if not self._sampling:
                        self._is_idle.set()
        except TimeoutError as error:
            raise ProviderError(
                f"{self.title} did not finish within {self._timeout_s:g} s; raise gateway.engine_timeout_s or lower max_tokens",
                reason="engine_error",
            ) from error
        await self._after(answer)

    async def load_policy(self, version: int, weights_ref: str) -> None:
        """As in `Engine`: `weights_ref` is a path that the server can read. One at a time.

        From before the reload until all of it is done the label is `loading-<version>`: where it fails, or this process dies on
        the way, the weights may be half of each, and no call sampled by them is trainable.
        """
        if self._admin_url is None:
            raise ProviderError(
                f"gateway.engine_admin_url is not set, so {self.title}'s weights cannot be changed; set it to the address of "
                "its control routes",
                reason="bad_request",
            )
        async with self._loading:
            self._is_open.clear()
            try:
                for answer in self._sampling.values():
                    answer.pause_mode, answer.cache_cleared = self._pause_mode, self._pause_mode != "keep"
                await self._load(version, weights_ref.removeprefix("file://"))
            finally:
                self._is_open.set()

    async def health(self) -> str | None:
        """As in `Engine`; a server that is away is probed again before the next call."""
        try:
            answer = await self._http.get("/health", timeout_s=_HEALTH_S)
        except EngineGone as error:
            self._is_probed = False
            return f"{self.title} does not answer: {error}"
        return None if answer.status == 200 else f"{self.title} at {self._url} answers {answer.status}"

    async def close(self) -> None:
        """As in `Engine`."""
        await self._http.close()

    @abstractmethod
    async def _probe(self) -> Identity:
        """Ask what the server is."""

    @abstractmethod
    def _request(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str) -> tuple[str, dict[str, Any]]:
        """Path and body that sample from ids; every field is named, since a server may have other defaults."""

    @abstractmethod
    def _take(self, event: dict[str, Any], answer: Answer) -> None:
        """Add one event of the stream to the answer; ids and log-probabilities as they are, equal in number or not."""

    @abstractmethod
    async def _load(self, version: int, path: str) -> None:
        """Change the weights. New calls of this process wait meanwhile."""

    async def _label(self) -> str | None:
        """The weight label that the server says it serves; None if it cannot be asked."""
        return None

    async def _is_paused(self) -> bool:
        """Whether somebody has paused the server, as far as it can be asked."""
        return False

    async def _after(self, answer: Answer) -> None:
        """What is to be found out once an answer is there."""
        finish = answer.finish
        if finish is None or not finish.reason:
            raise ProviderError(f"{self.title} ended the stream without a finish reason", reason="engine_error")
        self._has_spans = bool(finish.spans)
        if finish.spans:
            self._version, self._asked_at_s = version_of(finish.spans[-1].label), time.monotonic()
        else:
            await self._refresh()
        if finish.reason == "abort" and not answer.pause_mode and await self._is_paused():
            answer.pause_mode = "abort"

    async def _refresh(self) -> None:
        """Ask for the version; None where the answer is none."""
        try:
            async with self._answers("the question for its version"):
                label = await self._label()
        except ProviderError as error:
            _log.warning("the version that %s serves is not known: %s", self.title, error)
            self._version = None
            return
        if label is not None:
            self._version, self._asked_at_s = version_of(label), time.monotonic()
        elif not self._has_spans:
            self._version = None

    async def _drained(self) -> None:
        """Wait until no call of this process is being sampled. Raises: ProviderError: as for a call that takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._is_idle.wait()
        except TimeoutError as error:
            raise ProviderError(
                f"calls do not end within {self._timeout_s:g} s, so the weights were not changed; raise "
                "gateway.engine_timeout_s, or set gateway.engine_pause_mode to abort",
                reason="engine_error",
            ) from error

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        async with self._http.stream(path, body) as response:
            if response.status != 200:
                raise self._refusal(path, response.status, await response.read())
            async for line in response.lines():
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                event = orjson.loads(line[5:])
                if "error" in event:
                    raise self._refusal(path, int(event["error"].get("code") or 500), line[5:])
                yield event

    async def _get(self, path: str) -> Any:
        async with self._answers(path):
            return self._read(path, await self._http.get(path))

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._answers(path):
            return self._read(path, await self._http.post(path, body))

    async def _tried(self, path: str, body: dict[str, Any]) -> Any:
        """An answer to a probe; None if the server refuses it."""
        async with self._answers(path):
            response = await self._http.post(path, body)
            return orjson.loads(response.content) if response.status == 200 else None

    def _read(self, path: str, response: Answered) -> Any:
        if response.status != 200:
            raise self._refusal(path, response.status, response.content)
        return orjson.loads(response.content)

    async def _admin(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._post(self._admin_path(path), body)

    def _admin_path(self, path: str) -> str:
        return f"{(self._admin_url or '').rstrip('/')}{path}"

    @asynccontextmanager
    async def _answers(self, path: str) -> AsyncIterator[None]:
        """Foreign errors of a request as ProviderError; a server that went away is probed again before the next call."""
        try:
            yield
        except EngineGone:
            self._is_probed = False
            raise
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ProviderError(
                f"{self.title}'s answer to {path} is not understood: {type(error).__name__}: {error}; supported are "
                f"{self.supported}",
                reason="engine_error",
            ) from error

    def _refusal(self, path: str, status: int, body: bytes) -> ProviderError:
        """The server's error answer as ours."""
        try:
            error = orjson.loads(body)
            error = error.get("error", error)
            message = str(error["message"] if isinstance(error, dict) else error)
        except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
            message = body[:500].decode(errors="replace")
        if status == 400 and _is_too_long(message):
            reason = "context_length"
        elif status == 503:
            reason = "engine_down"
        else:
            reason = "bad_request" if status in (400, 422) else "engine_error"
        return ProviderError(f"{self.title} answers {status} to {path}: {message}", reason=reason)


def version_of(label: str) -> int | None:
    """A weight label as a policy version; None if it is none."""
    label = "0" if label == "default" else label
    return int(label) if label.isascii() and label.isdecimal() else None


def as_ids(values: Any) -> Ids:
    """A list of token ids from JSON. Raises: ValueError, TypeError, OverflowError."""
    return np.array(values, dtype=np.uint32)


def _is_too_long(message: str) -> bool:
    words = message.lower()
    return any(
        part in words
        for part in ("maximum context length", "maximum model length", "model's context length", "context_length")
    )
