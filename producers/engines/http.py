"""The HTTP client of engines: JSON requests and event streams to one server.

aiohttp, since a call makes three requests and httpx's pool takes several milliseconds of CPU for each with many open
connections, which was most of what the gateway did.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson

from rollstream.errors import ProviderError

_CONNECT_S = 5.0
_IDLE_S = 2.0  # shorter than vLLM keeps an idle connection (5 s), so that no request meets a closing one
_LONGEST_LINE = 64 << 20  # bytes; an event holds the ids of a whole prompt
_JSON = {"content-type": "application/json"}


class EngineGone(ProviderError):
    """The connection was refused or broke: reason `engine_down` or `engine_error`. What answers next may be another server."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer."""

    status: int
    """HTTP status."""
    content: bytes
    """Its body."""


class Stream:
    """An answer whose body comes line by line."""

    def __init__(self, url: str, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        """HTTP status."""
        self._url = url
        self._response = response

    async def read(self) -> bytes:
        """The whole body."""
        with _gone(self._url):
            return await self._response.read()

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines without their ends."""
        with _gone(self._url):
            async for line in self._response.content:
                yield line.rstrip(b"\r\n")


class EngineHttp:
    """Requests to one server; a path may also be a whole address. The connections are made at the first one."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Args: timeout_s: longest silence of the server."""
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=timeout_s)
        self._proxies: dict[tuple[str, str], str | None] = {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> Answered:
        """Args: timeout_s: for all of it. Raises: EngineGone."""
        limits = None if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        return await self._ask("GET", path, None, limits)

    async def post(self, path: str, body: Any = None) -> Answered:
        """Args: body: sent as JSON; None sends none. Raises: EngineGone."""
        return await self._ask("POST", path, body, None)

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[Stream]:
        """An answer to a JSON request while it comes; leaving early closes the connection. Raises: EngineGone."""
        url = self._at(path)
        with _gone(url):
            response = await self._open().post(url, data=orjson.dumps(body), headers=_JSON, proxy=self._proxy_of(url))
        async with response:
            yield Stream(url, response)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, path: str, body: Any, limits: aiohttp.ClientTimeout | None) -> Answered:
        url = self._at(path)
        data, headers = (None, None) if body is None else (orjson.dumps(body), _JSON)
        with _gone(url):
            async with self._open().request(
                method, url, data=data, headers=headers, timeout=limits or self._timeout, proxy=self._proxy_of(url)
            ) as response:
                return Answered(response.status, await response.read())

    def _proxy_of(self, url: str) -> str | None:
        """The environment's proxy for an address; looked up once a host, for aiohttp reads `~/.netrc` for every request."""
        place = urlsplit(url)
        key = (place.scheme, place.netloc)
        if key not in self._proxies:
            is_direct = bool(proxy_bypass(place.netloc))
            self._proxies[key] = None if is_direct else getproxies().get(place.scheme)
        return self._proxies[key]

    def _at(self, path: str) -> str:
        return path if "://" in path else f"{self._url}{path}"

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=self._timeout,
                read_bufsize=_LONGEST_LINE // 2,  # aiohttp takes lines of up to twice its buffer's size
            )
        return self._session


@contextmanager
def _gone(url: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineGone(f"the engine at {url} cannot be reached: {error}", reason="engine_down") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineGone(
            f"the engine broke off {url}: {type(error).__name__}: {error}", reason="engine_error"
        ) from error
