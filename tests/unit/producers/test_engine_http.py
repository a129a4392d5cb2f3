"""The HTTP requests to an engine: what a proxy of the environment is used for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollstream.producers.engines.http import EngineGone, EngineHttp


@pytest.fixture
async def proxy_lines() -> AsyncIterator[tuple[str, list[str]]]:
    """A proxy that answers 204 to whatever it is asked; its address and the first lines of what it was asked."""
    lines: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines.append(head.split(b"\r\n", 1)[0].decode())
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lines


@pytest.mark.parametrize(
    ("no_proxy", "first_line"), [("", "GET http://engine.example/health HTTP/1.1"), ("engine.example", None)]
)
async def test_requests_go_through_the_proxy_of_the_environment_unless_the_host_is_exempt(
    monkeypatch: pytest.MonkeyPatch, proxy_lines: tuple[str, list[str]], no_proxy: str, first_line: str | None
) -> None:
    """`HTTP_PROXY` and `NO_PROXY` count as for any program; a name that only the proxy knows is not looked up."""
    address, lines = proxy_lines
    monkeypatch.setenv("http_proxy", address)
    monkeypatch.setenv("no_proxy", no_proxy)
    http = EngineHttp("http://engine.example", timeout_s=5)

    if first_line is None:
        with pytest.raises(EngineGone, match="cannot be reached"):
            await http.get("/health")
        assert lines == []
    else:
        assert (await http.get("/health")).status == 204
        assert lines == [first_line]
    await http.close()
