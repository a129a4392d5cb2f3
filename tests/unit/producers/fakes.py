"""An engine that answers from a script, over the toy vocabulary of the design notes, and a gateway around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation, Finish, Identity, Ids, LabelSpan
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.memory import MemoryPublisher
from rollstream.schemas.records import Encoding, LogprobSemantics, SamplingParams
from rollstream.settings import GatewaySettings

VOCABULARY = {
    1: "<|im_start|>", 2: "<|im_end|>", 3: "\n", 4: "user", 5: "assistant", 6: "tool", 7: "<think>", 8: "</think>",
    9: "\n\n", 10: "a", 11: "b", 12: "ab", 13: "{", 14: "}", 15: '"x"', 16: ":", 17: ": ", 18: "1", 28: "ok", 29: "hi",
}  # fmt: skip
PROMPT = (1, 4, 3, 29, 2, 3, 1, 5, 3)
"""The user says hi."""


def identity(**changes: Any) -> Identity:
    """What the fake engine is."""
    values: dict[str, Any] = {
        "engine": "fake",
        "engine_version": "1",
        "model": "policy",
        "encoding": Encoding("t", "c", "k", "none"),
        "vocabulary_tokens": 40,
        "max_context_tokens": 64,
        "semantics": LogprobSemantics.PROCESSED,
    }
    return Identity(**{**values, **changes})


@dataclass
class Play:
    """How the fake engine answers one call."""

    chunks: list[list[int]] = field(default_factory=lambda: [[28], [2]])
    logprob: float = -0.5
    reason: str = "stop"
    spans: tuple[LabelSpan, ...] | None = None
    """None: all tokens by version 0."""
    fails_after: int | None = None
    """Fail once this many chunks were given."""
    waits_after: int | None = None
    """Wait for the engine's `go` once this many chunks were given."""


class FakeEngine:
    """Answers from `plays`, the last one again and again."""

    def __init__(self, *plays: Play) -> None:
        self.plays = list(plays) or [Play()]
        self.what = identity()
        self.version: int | None = 0
        self.is_down = False
        self.requests: list[tuple[list[int], SamplingParams, str]] = []
        self.is_cancelled = False
        self.is_waiting = asyncio.Event()
        self.go = asyncio.Event()
        self.loaded: list[tuple[int, str]] = []

    async def start(self) -> None:
        if self.is_down:
            raise ProviderError("the fake engine is down", reason="engine_down")

    def identity(self) -> Identity:
        return self.what

    async def render(self, conversation: Conversation) -> Ids:
        ids: list[int] = []
        known = {text: token for token, text in VOCABULARY.items()}
        for message in conversation.messages:
            content = [known[word] for word in (message.get("content") or "").split()]
            ids += [1, known.get(message["role"], 4), 3, *content, 2, 3]
        return np.array([*ids, 1, 5, 3], dtype=np.uint32)

    async def encode(self, text: str) -> Ids:
        known = {text: token for token, text in VOCABULARY.items()}
        return np.array([known[word] for word in text.split()], dtype=np.uint32)

    async def decode(self, ids: Sequence[int]) -> str:
        return "".join(VOCABULARY[i] for i in ids if i != 2)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        self.requests.append((prompt_ids.tolist(), sampling, request_id))
        play = self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        try:
            for given in range(len(play.chunks) + 1):
                if play.waits_after == given:
                    self.is_waiting.set()
                    await self.go.wait()
                if play.fails_after == given:
                    raise ProviderError("the fake engine died", reason="engine_error")
                if given < len(play.chunks):
                    answer.ids += play.chunks[given]
                    answer.logprobs += [play.logprob] * len(play.chunks[given])
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        spans = (LabelSpan(0, len(answer.ids), "default"),) if play.spans is None else play.spans
        answer.finish = Finish(play.reason, spans, prompt_ids, len(answer.ids))

    async def parse(
        self, conversation: Conversation, ids: list[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        return {"role": "assistant", "content": await self.decode(ids)}

    async def load_policy(self, version: int, weights_ref: str) -> None:
        self.loaded.append((version, weights_ref))

    async def health(self) -> str | None:
        return "the fake engine is down" if self.is_down else None

    async def close(self) -> None:
        pass


@dataclass
class Rig:
    """A started gateway with its fake surroundings."""

    gateway: Gateway
    engine: FakeEngine
    publisher: MemoryPublisher
    http: httpx.AsyncClient
    """Reaches the public application."""
    admin: httpx.AsyncClient
    """Reaches the admin application."""
    now: list[int]
    """The gateway's clock, one number."""

    async def open(self, rollout_id: str = "r-1", **values: Any) -> dict[str, Any]:
        """Open a rollout; returns the answer."""
        answer = await self.admin.post("/rollouts", json={"task_id": "t", "rollout_id": rollout_id, **values})
        assert 201 == answer.status_code, answer.text
        opened: dict[str, Any] = answer.json()
        return opened

    async def chat(self, opened: dict[str, Any], content: str = "hi", **values: Any) -> httpx.Response:
        """Send one call."""
        return await self.http.post(
            opened["base_url"] + "/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": content}], **values},
            headers={"authorization": f"Bearer {opened['api_key']}"},
        )


@asynccontextmanager
async def started_gateway(
    folder: Path,
    *plays: Play,
    policy_log: Any = None,
    engine: FakeEngine | None = None,
    publisher: MemoryPublisher | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A gateway over the fake engine and the in-memory publisher, reached without a network.

    Args: engine: None makes one of the plays. publisher: one that another gateway writes to as well.
    """
    engine, publisher, now = engine or FakeEngine(*plays), publisher or MemoryPublisher(), [1_000_000]
    values: dict[str, Any] = {
        "key_secret": "s",
        "spool_dir": folder / "spool",
        "ack_timeout_s": 0.05,
        "admin_port": 0,
        **settings,
    }
    gateway = Gateway(
        GatewaySettings(**values),
        engine,
        lambda: publisher,
        policy_log=policy_log,
        address="http://gateway",
        keep_alive_s=0.02,
        now_ms=lambda: now[0],
    )
    await gateway.start()
    public, boss = (httpx.ASGITransport(app) for app in (gateway.app, gateway.admin))
    async with (
        httpx.AsyncClient(transport=public, base_url="http://gateway") as http,
        httpx.AsyncClient(transport=boss, base_url="http://admin") as admin,
    ):
        yield Rig(gateway, engine, publisher, http, admin, now)
    await gateway.stop()


class AsgiClient:
    """One request made by hand, so that a test sees each part of the answer and can leave in the middle."""

    def __init__(self, app: Any, path: str, key: str, body: bytes) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"authorization", f"Bearer {key}".encode())], "server": ("gateway", 80), "client": ("c", 1),
        }  # fmt: skip
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        """What came so far."""
        return b"".join(message.get("body", b"") for message in self.sent)
