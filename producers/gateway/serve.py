"""Runs the gateway process: uvicorn over uvloop and httptools, one process, one event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
from starlette.applications import Starlette

from rollstream.errors import SettingsError
from rollstream.producers.engines import make_engine
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.kafka import KafkaPublisher
from rollstream.producers.policy_log import PolicyLog
from rollstream.settings import Settings

_BACKLOG = 2048
_STOP_S = 20
"""How long calls in flight may take to end when the process is stopped; then they are cancelled and recorded as cut off."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (httpx: 5 s, openai: 60 s), so that no request meets a closing one."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then calls in flight are answered first, or cut off and recorded.

    Prints `listening on http://HOST:PORT` once the port is open, and `admin on ...` where there is one; what connects from then
    on is answered when the start is done.

    Raises: SettingsError: the address cannot be listened on, or the engine's settings are wrong.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    gateway = settings.gateway
    public = _listen(gateway.host, gateway.port, "")
    admin = None if gateway.admin_port is None else _listen(gateway.admin_host, gateway.admin_port, "admin_")
    engine = make_engine(gateway)
    policy_log = PolicyLog(settings.kafka, gateway.policy) if gateway.engine == "local" else None
    built = Gateway(
        gateway,
        engine,
        lambda: KafkaPublisher(settings.kafka, settings.claims),
        policy_log=policy_log,
        address=None if admin is None else _address(public),
    )
    print(f"listening on {_address(public)}", flush=True)
    servers = [(_Server(_config(built.app)), public)]
    if admin is not None:
        print(f"admin on {_address(admin)}", flush=True)
        servers.append((_Server(_config(built.admin)), admin))
    uvloop.run(_serve(servers))


async def _serve(servers: list[tuple[_Server, socket.socket]]) -> None:
    """Run the servers until a signal; a second SIGINT does not wait for calls in flight."""

    def stop(number: int) -> None:
        for server, _ in servers:
            server.handle_exit(number, None)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in servers))


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: of two servers in one process, the later would take them from the earlier."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        lifespan="on",
        access_log=False,
        log_config=None,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
    )


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _listen(host: str, port: int, which: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as cause:
        listener.close()
        raise SettingsError(
            f"cannot listen on gateway.{which}host={host!r} gateway.{which}port={port}: {cause}; take another port, or 0 for a "
            "free one"
        ) from cause
    listener.listen(_BACKLOG)
    return listener
