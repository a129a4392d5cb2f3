"""The gateway on a socket, between an official client and the scripted engine; records go into memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rollstream.producers.engines import make_engine
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.records import ModelCall
from rollstream.settings import GatewaySettings
from tests.contract.protocols.speakers import SPEAKERS
from tests.contract.protocols.speakers.base import Speaker
from tests.scripted.engine import ScriptedEngine


@dataclass
class World:
    """Everything that a test may look at."""

    engine: ScriptedEngine
    publisher: MemoryPublisher
    gateway: Gateway
    speaker: Speaker
    root_url: str
    api_key: str
    sent: list[bytes]
    """Parts of bodies that the public port has sent, in order."""

    @property
    def calls(self) -> list[ModelCall]:
        """Outcomes, in log order."""
        return [record for record in self.publisher.records if isinstance(record, ModelCall)]

    @property
    def call(self) -> ModelCall:
        """The only outcome."""
        (call,) = self.calls
        return call

    def another(self, api_key: str | None = None) -> Speaker:
        """Another client of the same protocol and rollout. Args: api_key: another key."""
        return SPEAKERS[self.speaker.protocol](self.root_url, api_key or self.api_key)


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until something holds; a few seconds later it never will."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def served_world(
    folder: Path, protocol: str, engine: ScriptedEngine | None = None, *, keep_alive_s: float = 30.0, **settings: Any
) -> AsyncIterator[World]:
    """A rollout that is open, and a client for it."""
    engine, publisher = engine or ScriptedEngine(), MemoryPublisher()
    async with engine.served() as engine_url:
        values = {
            "spool_dir": folder / "spool",
            "key_secret": "s",
            "engine_url": engine_url,
            "admin_port": 0,
            **settings,
        }
        values = {"engine_admin_url": engine_url, **values}
        given = GatewaySettings(**values)
        gateway = Gateway(given, make_engine(given), lambda: publisher, keep_alive_s=keep_alive_s)
        sent: list[bytes] = []
        async with _on_socket(_watched(gateway.app, sent)) as url:
            admin = httpx.ASGITransport(gateway.admin)
            async with httpx.AsyncClient(transport=admin, base_url=url) as http:
                opened = (await http.post("/rollouts", json={"task_id": "t", "rollout_id": "r-1"})).json()
            speaker = SPEAKERS[protocol](opened["root_url"], opened["api_key"])
            try:
                yield World(engine, publisher, gateway, speaker, opened["root_url"], opened["api_key"], sent)
            finally:
                await speaker.close()


def _watched(app: Any, sent: list[bytes]) -> Any:
    """An application that also notes what it sends."""

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            await send(message)
            if message.get("body"):
                sent.append(message["body"])

        await app(scope, receive, noting)

    return watched


@asynccontextmanager
async def _on_socket(app: Any) -> AsyncIterator[str]:
    """Serve in this event loop, start and stop included."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on", ws="none")
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or task.done())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Leaves signals to pytest."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
