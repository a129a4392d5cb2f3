"""The scripted engine: the routes of vLLM that `producers/engines/vllm.py` asks for, over aiohttp, in the test's event loop.

    engine = ScriptedEngine(Play("first"), Play("then this"))
    async with engine.served() as url: ...

Each generate request takes the next play, the last one again and again; `plan` decides by the request instead, which is what a
harness needs whose calls come in any order. `requests`, `cancelled` and `posted` say what was asked for.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollstream.producers.parsers import PARSERS
from tests.scripted.plays import Asked, Play
from tests.scripted.tongue import BpeTongue, Tongue

_LOGITS = (0.0, -1.0, -2.5)
"""Of the first three ids, whatever the prompt: what the gateway tells the kind of log-probabilities by."""


class ScriptedEngine:
    """See the module.

    Args: tongue: tokenizer and template. plan: the play for a request; None takes `plays` in order.
    """

    def __init__(
        self,
        *plays: Play,
        tongue: Tongue | None = None,
        plan: Callable[[Asked], Play] | None = None,
        model: str = "policy",
        max_context_tokens: int = 4096,
        parser: str = "hermes",
    ) -> None:
        self.plays = list(plays) or [Play()]
        self.plan = plan
        self.tongue = tongue or BpeTongue()
        self.model = model
        self.max_context_tokens = max_context_tokens
        self.parser = parser
        self.label = "default"
        """Weight label that tokens get."""
        self.is_raw = False
        """Log-probabilities are the model's own, as without `--logprobs-mode processed_logprobs`."""
        self.has_scale_out = True
        """The render and generate routes are open."""
        self.has_spans = True
        """Answers say which weights sampled them."""
        self.requests: list[Asked] = []
        """Generate requests that were streamed, in order."""
        self.rendered: list[dict[str, Any]] = []
        """Bodies of render requests, in order."""
        self.posted: list[tuple[str, Any]] = []
        """Path and body of every other POST, in order."""
        self.cancelled: list[str] = []
        """Ids of requests whose client went away before the end."""
        self.is_waiting = asyncio.Event()
        """A play waits."""
        self.go = asyncio.Event()
        """Set by a test: what waits goes on."""
        self.paused: str | None = None
        """Mode of the pause, if there is one."""
        self._running: set[asyncio.Event] = set()
        """The abort signals of running requests."""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve on a free port of the loopback address. Returns: the address."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        answers: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "0.33.0"},
            "/v1/models": {"data": [{"id": self.model, "max_model_len": self.max_context_tokens}]},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.paused is not None},
        }
        if request.path not in answers:
            return _error(404, f"no route GET {request.path}")
        return web.json_response(answers[request.path])

    async def _post(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        path = request.path
        if path.endswith(("/render", "/derender", "/generate")) and not self.has_scale_out:
            return _error(403, "start with --enable-scale-out")
        if path == "/inference/v1/generate":
            return await self._generate(request, body)
        if path == "/v1/chat/completions/render":
            self.rendered.append(body)
            return web.json_response({"token_ids": self._rendered(body)})
        self.posted.append((path, body))
        if path == "/tokenize":
            tokens = self.tongue.encode(body["prompt"]) if "prompt" in body else self._rendered(body)
            return web.json_response({"tokens": tokens})
        if path == "/detokenize":
            return web.json_response({"prompt": self.tongue.decode(body["tokens"])})
        if path == "/v1/chat/completions/derender":
            message = self._message(body["generate_response"]["choices"][0]["token_ids"])
            return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})
        return self._control(request, body)

    def _control(self, request: web.Request, body: Any) -> web.Response:
        if request.path == "/pause":
            self.paused = request.query.get("mode", "abort")
            if self.paused == "abort":
                for aborted in self._running:
                    aborted.set()
        elif request.path == "/resume":
            self.paused = None
        elif request.path == "/update_weight_version":
            self.label = body["new_version"]
        elif request.path not in (
            "/collective_rpc",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ):
            return _error(404, f"no route POST {request.path}")
        return web.json_response({})

    def _rendered(self, body: Any) -> list[int]:
        return self.tongue.render(body["messages"], body.get("tools"), **(body.get("chat_template_kwargs") or {}))

    def _message(self, ids: list[int]) -> dict[str, Any]:
        """The message as vLLM's parsers make it: thoughts are `reasoning`, ids of tool calls are random."""
        parsed = PARSERS[self.parser](self.tongue.decode(ids))
        calls = [
            {"id": f"chatcmpl-tool-{at}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for at, c in enumerate(parsed.calls)
        ]
        content = parsed.content or (None if calls else "")
        return {"role": "assistant", "content": content, "reasoning": parsed.reasoning, "tool_calls": calls}

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        params = body["sampling_params"]
        if not body["stream"]:
            return web.json_response({"choices": [self._probed(params["temperature"])]})
        prompt_ids = body["token_ids"]
        asked = Asked(
            prompt_ids,
            self.tongue.decode(prompt_ids),
            body["request_id"],
            params["max_tokens"],
            tuple(params["stop"]),
            params,
        )
        self.requests.append(asked)
        if self.paused in ("abort", "wait"):
            return _error(503, "engine_paused")
        play = self.plan(asked) if self.plan else self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        if play.status != 200:
            return _error(play.status, play.text)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        aborted = asyncio.Event()
        self._running.add(aborted)
        try:
            await self._stream(response, asked, play, aborted)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled.append(asked.request_id)
            raise
        finally:
            self._running.discard(aborted)
        return response

    async def _stream(self, response: web.StreamResponse, asked: Asked, play: Play, aborted: asyncio.Event) -> None:
        ids, reason, stop = self._sampled(asked, play)
        chunks = [ids[at : at + play.chunk_tokens] for at in range(0, len(ids), play.chunk_tokens)] or [[]]
        sent: list[int] = []
        for number, chunk in enumerate(chunks):
            if play.waits_after == number:
                self.is_waiting.set()
                await _first_of(self.go, aborted)
            if aborted.is_set():
                chunk, reason, stop = [], "abort", None
            if play.dies_after == number:
                assert response._payload_writer is not None
                response._payload_writer.transport.abort()  # type: ignore[attr-defined]
                return
            if play.fails_after == number:
                error = {"message": "out of order, as asked", "code": 500}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
                return
            is_last = number == len(chunks) - 1 or aborted.is_set()
            choice = self._choice(chunk, len(sent), play)
            sent += chunk
            if is_last:
                choice |= {
                    "finish_reason": reason,
                    "stop_reason": stop,
                    "weight_versions": self._spans(play, len(sent)),
                }
            more = {"prompt_token_ids": list(play.echo or asked.prompt_ids)} if number == 0 else {}
            if number not in play.hidden_chunks:
                await _event(response, {"usage": None, "choices": [choice], **more})
            if is_last:
                break
        counted = len(sent) if play.counted is None else play.counted
        usage = {"prompt_tokens": len(asked.prompt_ids), "completion_tokens": counted}
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    def _sampled(self, asked: Asked, play: Play) -> tuple[list[int], str, str | None]:
        """Ids, how they end, and the stop string that ended them: the ids keep the token that completed it."""
        ids = [*self.tongue.encode(play.text), self.tongue.end_id] if play.ids is None else list(play.ids)
        for count in range(1, len(ids) + 1):
            text = self.tongue.decode(ids[:count]) if asked.stop else ""
            for stop in asked.stop:
                if stop in text:
                    return ids[:count], "stop", stop
            if count == asked.max_tokens and count < len(ids):
                return ids[:count], "length", None
        return ids, play.reason or "stop", None

    def _choice(self, ids: list[int], first: int, play: Play) -> dict[str, Any]:
        given = play.logprobs
        at = range(first, first + len(ids))
        values = [given(i) for i in at] if callable(given) else list(given[first : first + len(ids)])
        content = [{"token_id": token, "logprob": value} for token, value in zip(ids, values, strict=False)]
        return {"index": 0, "finish_reason": None, "token_ids": ids, "logprobs": {"content": content}}

    def _spans(self, play: Play, count: int) -> list[dict[str, Any]] | None:
        if not self.has_spans:
            return None
        spans = [(0, count, self.label)] if play.spans is None else play.spans
        return [{"start": start, "end": end, "version": label} for start, end, label in spans]

    def _probed(self, temperature: float) -> dict[str, Any]:
        """One token of the three likeliest after any prompt."""
        scaled = [logit / (1.0 if self.is_raw else temperature) for logit in _LOGITS]
        total = math.log(math.fsum(math.exp(value) for value in scaled))
        top = [{"token_id": at + 3, "logprob": value - total} for at, value in enumerate(scaled)]
        content = [{**top[0], "top_logprobs": top}]
        return {"token_ids": [3], "finish_reason": "length", "logprobs": {"content": content}}


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _event(response: web.StreamResponse, values: Any) -> None:
    await response.write(b"data: " + json.dumps(values).encode() + b"\n\n")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
