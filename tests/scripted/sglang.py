"""The scripted engine as an SGLang server: the routes that `producers/engines/sglang.py` asks for. See `engine.py`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.scripted.engine import ScriptedEngine, _event, _first_of
from tests.scripted.plays import Asked, Play


class ScriptedSglang(ScriptedEngine):
    """Plays over `/generate`; events hold everything so far unless `is_incremental`."""

    is_incremental = False
    """Events hold what is new, as with `--incremental-streaming-output`."""
    prompt_tokens: int | None = None
    """Length of the prompt that it says it was conditioned on; None is the true one."""

    async def _get(self, request: web.Request) -> web.Response:
        answers: dict[str, Any] = {
            "/health": {},
            "/model_info": {"weight_version": self.label, "tool_call_parser": None, "reasoning_parser": None},
            "/server_info": {"version": "0.5.23", "incremental_streaming_output": self.is_incremental},
            "/v1/models": {"data": [{"id": self.model, "max_model_len": self.max_context_tokens}]},
        }
        if request.path not in answers:
            return _refused(404, f"no route GET {request.path}")
        return web.json_response(answers[request.path])

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body, path = json.loads(await request.text()), request.path
        if path == "/generate":
            return await self._generate(request, body)
        if path == "/tokenize":
            if "messages" in body:
                self.rendered.append(body)
            tokens = self.tongue.encode(body["prompt"]) if "prompt" in body else self._rendered(body)
            return web.json_response({"tokens": tokens})
        self.posted.append((path, body))
        if path == "/detokenize":
            return web.json_response({"text": self.tongue.decode(body["tokens"])})
        return self._control(request, body)

    def _control(self, request: web.Request, body: Any) -> web.Response:
        if request.path == "/pause_generation":
            self.paused = body["mode"]
            if self.paused == "abort":
                for aborted in self._running:
                    aborted.set()
        elif request.path == "/continue_generation":
            self.paused = None
        elif request.path == "/update_weight_version":
            self.label = body["new_version"]
        elif request.path != "/update_weights_from_disk":
            return _refused(404, f"no route POST {request.path}")
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        params = body["sampling_params"]
        if not body["stream"]:
            content = self._probed(params["temperature"])["logprobs"]["content"][0]
            top = [[one["logprob"], one["token_id"], None] for one in content["top_logprobs"]]
            return web.json_response({"output_ids": [3], "meta_info": {"output_top_logprobs": [top]}})
        prompt_ids = body["input_ids"]
        limit, stop = params["max_new_tokens"], tuple(params["stop"])
        asked = Asked(prompt_ids, self.tongue.decode(prompt_ids), body["rid"], limit, stop, params)
        self.requests.append(asked)
        play = self.plan(asked) if self.plan else self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        if play.status != 200:
            return _refused(play.status, play.text)
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
        ends = {"stop": {"matched": stop or ids[-1]} if ids else {}, "length": {"length": len(ids)}}
        sent: list[int] = []
        for number, chunk in enumerate(chunks):
            if play.waits_after == number:
                self.is_waiting.set()
                await _first_of(self.go, aborted)
            if aborted.is_set():
                chunk, reason = [], "abort"
            if play.dies_after == number:
                assert response._payload_writer is not None
                response._payload_writer.transport.abort()  # type: ignore[attr-defined]
                return
            if play.fails_after == number:
                await _event(response, {"error": {"message": "out of order, as asked", "code": 500}})
                break
            first = len(sent) if self.is_incremental else 0
            sent += chunk
            is_last = number == len(chunks) - 1 or aborted.is_set()
            shown = sent[first:]
            content = self._choice(shown, first, play)["logprobs"]["content"]
            spans = self._spans(play, len(sent))
            counted = len(sent) if play.counted is None or not is_last else play.counted
            info = {
                "id": asked.request_id,
                "finish_reason": {"type": reason, **ends.get(reason, {})} if is_last else None,
                "prompt_tokens": len(asked.prompt_ids) if self.prompt_tokens is None else self.prompt_tokens,
                "completion_tokens": counted,
                "weight_version": self.label,
                "output_token_logprobs": [[one["logprob"], one["token_id"], None] for one in content],
                **({"weight_versions": spans} if spans else {}),
            }
            if number not in play.hidden_chunks:
                await _event(response, {"text": self.tongue.decode(shown), "output_ids": shown, "meta_info": info})
            if is_last:
                break
        await response.write(b"data: [DONE]\n\n")


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
