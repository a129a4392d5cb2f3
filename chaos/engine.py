"""A stand-in for vLLM's HTTP routes: `python -m chaos.engine --port PORT`.

It has no state and says what `chaos.truth` says, so any number of them, killed at any time, are one engine. It serves what
`producers/engines/vllm.py` asks for with `--enable-scale-out`, and a route to make it misbehave:

    POST /control {"kind": "error" | "hang" | "cut", "requests": n}     the next n generate requests
    GET  /control                                                       counts of requests and of what is left to spoil

`error` answers 500, `hang` answers nothing, `cut` sends the first tokens and closes the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import httptools
import numpy as np
import orjson
import uvloop

from chaos.truth import Sampled, from_ids, render, sample, text_of, to_ids
from rollstream.schemas.prompts import Ids

_CONTEXT_TOKENS = 32_768
_VERSION = "0.32.0"
_SPOILS = ("error", "hang", "cut")
_LOGITS = (0.0, -1.0, -2.5)
"""Of the first three ids, whatever the prompt: what the gateway tells the kind of log-probabilities by."""
_GENERATE = b"/inference/v1/generate"
_HEAD = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 500: b"Internal Server Error"}


class Engine:
    """What the routes say. Args: model: the one model that is served."""

    def __init__(self, model: str = "policy") -> None:
        self._model = model
        self.spoiled: list[str] = []
        """What happens to the next generate requests, first to last."""
        self.requests: Counter[str] = Counter()
        """Requests by path."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of every route but a streamed generate."""
        self.requests[path] += 1
        values = orjson.loads(body) if body else {}
        route: Callable[[Any], Any] | None = {
            ("GET", "/health"): lambda _: {},
            ("GET", "/version"): lambda _: {"version": _VERSION},
            ("GET", "/v1/models"): lambda _: {"data": [{"id": self._model, "max_model_len": _CONTEXT_TOKENS}]},
            ("POST", "/v1/chat/completions/render"): lambda v: {"token_ids": _listed(render(v["messages"]))},
            ("POST", "/v1/chat/completions/derender"): _derender,
            ("POST", "/tokenize"): lambda v: {"tokens": _listed(v["prompt"].encode())},
            ("POST", "/inference/v1/generate"): _likeliest,
            ("GET", "/control"): lambda _: {"requests": dict(self.requests), "spoiled": self.spoiled},
            ("POST", "/control"): self._spoil,
        }.get((method, path))
        if route is None:
            return 404, {"error": {"message": f"no route {method} {path}", "code": 404}}
        try:
            return 200, route(values)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return 400, {"error": {"message": f"{type(error).__name__}: {error}", "code": 400}}

    def next_spoil(self) -> str | None:
        """What shall happen to this generate request; None for nothing."""
        return self.spoiled.pop(0) if self.spoiled else None

    def _spoil(self, values: Any) -> Any:
        if values["kind"] not in _SPOILS:
            raise ValueError(f"kind={values['kind']!r}: expected one of {_SPOILS}")
        self.spoiled += [values["kind"]] * int(values["requests"])
        return {"spoiled": len(self.spoiled)}


def generate(values: Any) -> Sampled:
    """What a generate request samples. Raises: as `truth.from_ids`; KeyError, TypeError: the body is no request."""
    params = values["sampling_params"]
    return sample(
        from_ids(_array(values["token_ids"])),
        request_id=values["request_id"],
        temperature=params["temperature"],
        max_tokens=params["max_tokens"],
        seed=params["seed"],
    )


def stream_parts(values: Any, sampled: Sampled) -> tuple[bytes, bytes]:
    """The events of a streamed answer: those with the first tokens, and the rest."""
    ids, cut = _listed(sampled.tokens), len(sampled.tokens) // 3
    spans = [{"version": str(s.version), "start": s.start, "end": s.end} for s in sampled.spans]
    first = _event(_choice(ids[:cut], sampled.logprobs[:cut]), prompt_token_ids=values["token_ids"])
    last = _event(_choice(ids[cut:], sampled.logprobs[cut:], sampled.finish_reason, spans))
    prompt_tokens = len(values["token_ids"])
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids), "total_tokens": prompt_tokens + len(ids)}
    end = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n"
    return first, last + end


def _choice(
    ids: Sequence[int], logprobs: Sequence[float], reason: str | None = None, spans: Any = None
) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
    return {
        "index": 0,
        "finish_reason": reason,
        "token_ids": ids,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


def _event(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + orjson.dumps({"usage": None, "choices": [choice], **more}) + b"\n\n"


def _derender(values: Any) -> Any:
    choice = values["generate_response"]["choices"][0]
    message = {"role": "assistant", "content": text_of(from_ids(_array(choice["token_ids"])))}
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


def _likeliest(values: Any) -> Any:
    """One token of the three likeliest after any prompt, at the temperature asked for; not streamed."""
    scaled = [logit / values["sampling_params"]["temperature"] for logit in _LOGITS]
    total = math.log(math.fsum(math.exp(value) for value in scaled))
    ids = _listed(bytes(range(len(scaled))))
    top = [{"token_id": token, "logprob": value - total} for token, value in zip(ids, scaled, strict=True)]
    choice = {
        "token_ids": ids[:1],
        "finish_reason": "length",
        "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
    }
    return {"choices": [choice]}


def _listed(tokens: bytes) -> list[int]:
    ids: list[int] = to_ids(tokens).tolist()
    return ids


def _array(values: Sequence[int]) -> Ids:
    return np.array(values, dtype=np.uint32)


class _Connection(asyncio.Protocol):
    """One client's connection; requests on it follow each other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url.partition(b"?")[0], []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        spoil = self._engine.next_spoil() if self._path == _GENERATE else None
        if spoil == "hang":
            return
        if spoil == "error":
            self._send(500, {"error": {"message": "out of order, as asked", "code": 500}})
            return
        if self._path == _GENERATE:
            values = orjson.loads(body)
            if values.get("stream"):
                self._stream(values, is_cut=spoil == "cut")
                return
        self._send(*self._engine.answer(self._parser.get_method().decode(), self._path.decode(), body))

    def _stream(self, values: Any, *, is_cut: bool) -> None:
        self._engine.requests["/inference/v1/generate"] += 1
        try:
            sampled = generate(values)
        except (KeyError, TypeError, ValueError) as error:
            self._send(400, {"error": {"message": f"{type(error).__name__}: {error}", "code": 400}})
            return
        first, rest = stream_parts(values, sampled)
        self._transport.write(_STREAM_HEAD + _chunk(first))
        if is_cut:
            self._transport.close()
            return
        self._loop.call_later(sampled.pause_ms / 1000, self._end, _chunk(rest) + _chunk(b""))

    def _end(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def _send(self, status: int, values: Any) -> None:
        body = orjson.dumps(values)
        self._transport.write(_HEAD % (status, _REASONS[status], len(body)) + body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(host: str, port: int, engine: Engine) -> asyncio.Server:
    """Serve until the server is closed."""
    return await asyncio.get_running_loop().create_server(lambda: _Connection(engine), host, port, backlog=1024)


async def _run(host: str, port: int, model: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await serve(host, port, Engine(model))
    print(f"serving on http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()
    server.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m chaos.engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="policy", help="name of the served model")
    options = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_run(options.host, options.port, options.model))


if __name__ == "__main__":
    main()
