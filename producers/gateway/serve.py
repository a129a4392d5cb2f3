"""Runs the gateway process: uvicorn over uvloop and httptools, one process, one event loop."""

from __future__ import annotations

import logging
import socket

import uvicorn

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

    Prints `listening on http://HOST:PORT` once the port is open; what connects from then on is answered when the start is done.

    Raises: SettingsError: the address cannot be listened on, or the engine's settings are wrong.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    gateway = settings.gateway
    listener = _listen(gateway.host, gateway.port)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    engine = make_engine(gateway)
    policy_log = PolicyLog(settings.kafka, gateway.policy) if gateway.engine == "local" else None
    app = Gateway(gateway, engine, lambda: KafkaPublisher(settings.kafka, settings.claims), policy_log=policy_log).app
    print(f"listening on {address}", flush=True)
    config = uvicorn.Config(
        app,
        loop="uvloop",
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
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as cause:
        listener.close()
        raise SettingsError(
            f"cannot listen on gateway.host={host!r} gateway.port={port}: {cause}; take another port, or 0 for a free one"
        ) from cause
    listener.listen(_BACKLOG)
    return listener
