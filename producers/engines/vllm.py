"""vLLM over HTTP: render → ids → generate → derender.

Two paths, found out at the start. `scale-out` (vLLM started with `--enable-scale-out`): `/v1/chat/completions/render`, then
`/inference/v1/generate`, then `/v1/chat/completions/derender` for the message, with the server's own tool and reasoning
parsers. Where those routes are closed (403, 404): `/tokenize`, then `/v1/completions` with the ids, and our own parser. Either
way the prompt goes in as ids, every sampling field is explicit, and log-probabilities are asked for. Requests are streamed, so
that closing the connection cancels them and what was sampled so far is there.

Which distribution the log-probabilities belong to is a server flag that no answer tells: `_probe_semantics` finds it out.

Source: recorded bodies of vLLM 0.32; gateway.md §1 of the design notes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import orjson

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation, Finish, Identity, Ids, LabelSpan
from rollstream.producers.engines.http import EngineGone, EngineHttp
from rollstream.producers.engines.semantics import tell_semantics
from rollstream.producers.parsers import PARSERS, to_message
from rollstream.schemas.identity import digest_ids, digest_json
from rollstream.schemas.records import Encoding, LogprobSemantics, SamplingParams
from rollstream.schemas.types import pack_ids
from rollstream.settings import GatewaySettings

_log = logging.getLogger(__name__)
_HEALTH_S = 5.0
_CLOSED = (403, 404, 405)
"""What vLLM answers on routes that are not served."""
_PROBE_TEXT = 'Encoding probe: don\'t panic, 3.14 \u4f60\u597d \U0001f642\n\t<tool_call>{"a": [1, 2]}</tool_call>'
_PROBE_CHAT = Conversation([{"role": "system", "content": "probe"}, {"role": "user", "content": "Say a word."}])
_PROBE_LOGPROBS = 5


class VllmEngine:
    """A vLLM server; see the module."""

    def __init__(self, gateway: GatewaySettings, *, http: EngineHttp | None = None) -> None:
        """Args: http: for tests."""
        self._model = gateway.model_name
        self._parser = gateway.tool_parser
        self._timeout_s = gateway.engine_timeout_s
        self._url = gateway.engine_url
        self._http = http or EngineHttp(self._url, gateway.engine_timeout_s)
        self._admin_url = gateway.engine_admin_url
        self._identity: Identity | None = None
        self._is_probed = False
        self._probing = asyncio.Lock()
        self._has_scale_out = False
        self._version: int | None = None
        self._loading = asyncio.Lock()
        self._is_open = asyncio.Event()
        self._is_open.set()

    @property
    def version(self) -> int | None:
        """As in `Engine`: the version last seen in an answer or loaded."""
        return self._version

    def identity(self) -> Identity:
        """As in `Engine`."""
        if self._identity is None:
            raise ProviderError("vLLM was never reached", reason="engine_down")
        return self._identity

    async def start(self) -> None:
        """As in `Engine`; asks again after the server could not be reached, for it may have become another."""
        if self._is_probed:
            return
        async with self._probing:
            if not self._is_probed:
                async with self._answers("the questions at the start"):
                    self._identity = await self._probe()
                self._is_probed = True

    async def render(self, conversation: Conversation) -> Ids:
        """As in `Engine`."""
        path, body, field = "/v1/chat/completions/render", self._chat(conversation), "token_ids"
        if not self._has_scale_out:
            path, body, field = "/tokenize", {**body, "add_generation_prompt": True}, "tokens"
        async with self._answers(path):
            return _ids((await self._post(path, body))[field])

    async def encode(self, text: str) -> Ids:
        """As in `Engine`."""
        async with self._answers("/tokenize"):
            return _ids((await self._post("/tokenize", {"model": self._model, "prompt": text}))["tokens"])

    async def decode(self, ids: Sequence[int]) -> str:
        """As in `Engine`."""
        body = {"model": self._model, "tokens": list(ids)}
        async with self._answers("/detokenize"):
            return str((await self._post("/detokenize", body))["prompt"])

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        """As in `Engine`."""
        path, body = self._request(prompt_ids, sampling, request_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._is_open.wait()
                async with self._answers(path), aclosing(self._events(path, body)) as events:
                    async for event in events:
                        self._take(event, answer)
        except TimeoutError as error:
            raise ProviderError(
                f"vLLM did not finish within {self._timeout_s:g} s; raise gateway.engine_timeout_s or lower max_tokens",
                reason="engine_error",
            ) from error
        if answer.finish is None or not answer.finish.reason:
            raise ProviderError("vLLM ended the stream without a finish reason", reason="engine_error")

    async def parse(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        """As in `Engine`."""
        if not self._has_scale_out:
            return to_message(PARSERS[self._parser](text), f"call_{call_id}")
        choice = {"index": 0, "finish_reason": "stop", "token_ids": list(ids)}
        body = {
            "model": self._model,
            "generate_response": {"request_id": call_id, "choices": [choice]},
            "prompt_tokens": len(prompt_ids),
            "prompt_token_ids": prompt_ids.tolist(),
            "chat_request": self._chat(conversation),
        }
        path = "/v1/chat/completions/derender"
        async with self._answers(path):
            return _message((await self._post(path, body))["choices"][0]["message"], call_id)

    async def load_policy(self, version: int, weights_ref: str) -> None:
        """As in `Engine`: pause, reload from `weights_ref` (a path that vLLM can read), clear the cache, label, resume.

        One at a time. From before the reload until all of it is done the label is `loading-<version>`: where it fails, or this
        process dies on the way, the weights may be half of each, and no call sampled by them is trainable.
        """
        if self._admin_url is None:
            raise ProviderError(
                "gateway.engine_admin_url is not set, so vLLM's weights cannot be changed; set it to the address of a "
                "vLLM started with VLLM_SERVER_DEV_MODE=1",
                reason="bad_request",
            )
        path = weights_ref.removeprefix("file://")
        async with self._loading:
            self._is_open.clear()
            try:
                await self._admin("/pause?mode=wait")
                try:
                    await self._admin("/update_weight_version", {"new_version": f"loading-{version}"})
                    self._version = None
                    await self._admin(
                        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
                    )
                    await self._admin("/reset_prefix_cache")
                    await self._admin("/update_weight_version", {"new_version": str(version)})
                    self._version = version
                finally:
                    await self._admin("/resume")
            finally:
                self._is_open.set()

    async def health(self) -> str | None:
        """As in `Engine`."""
        try:
            answer = await self._http.get("/health", timeout_s=_HEALTH_S)
        except EngineGone as error:
            return f"vLLM does not answer: {error}"
        return None if answer.status == 200 else f"vLLM at {self._url} answers {answer.status}"

    async def close(self) -> None:
        """As in `Engine`."""
        await self._http.close()

    def _chat(self, conversation: Conversation) -> dict[str, Any]:
        """The body of a chat request as far as rendering and parsing look at it."""
        body: dict[str, Any] = {"model": self._model, "messages": conversation.messages}
        if conversation.tools:
            body["tools"] = conversation.tools
            body["tool_choice"] = conversation.tool_choice or "auto"
        if conversation.template_kwargs:
            body["chat_template_kwargs"] = conversation.template_kwargs
        return body

    def _request(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str) -> tuple[str, dict[str, Any]]:
        """Path and body that sample from ids; every field is named, since a server may have other defaults."""
        params: dict[str, Any] = {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
        }
        body: dict[str, Any] = {
            "model": self._model,
            "request_id": request_id,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self._has_scale_out:
            return "/inference/v1/generate", {**body, "token_ids": prompt_ids.tolist(), "sampling_params": params}
        more = {"prompt": prompt_ids.tolist(), "return_weight_versions": True}
        return "/v1/completions", {**body, **params, **more}

    def _take(self, event: dict[str, Any], answer: Answer) -> None:
        """Add one event of the stream to the answer; ids and log-probabilities as they are, equal in number or not."""
        finish = answer.finish or Finish("")
        echoed = event.get("prompt_token_ids")
        usage = event.get("usage")
        reason, spans, stop_string = finish.reason, finish.spans, finish.stop_string
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or ()
            if ids and answer.first_token_at_ms is None:
                answer.first_token_at_ms = time.time_ns() // 1_000_000
            answer.ids.extend(ids)
            answer.logprobs.extend(_logprobs(choice.get("logprobs")))
            answer.text += choice.get("text") or ""
            echoed = echoed or choice.get("prompt_token_ids")
            reason = choice.get("finish_reason") or reason
            stop = choice.get("stop_reason")
            stop_string = stop if isinstance(stop, str) else stop_string
            labels = choice.get("weight_versions")
            if labels:
                spans = tuple(LabelSpan(span["start"], span["end"], str(span["version"])) for span in labels)
                label = "0" if spans[-1].label == "default" else spans[-1].label
                self._version = int(label) if label.isdecimal() else None
        answer.finish = Finish(
            reason=reason,
            spans=spans,
            prompt_ids=_ids(echoed) if echoed else finish.prompt_ids,
            output_tokens=usage["completion_tokens"] if usage else finish.output_tokens,
            stop_string=stop_string,
        )

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        async with self._http.stream(path, body) as response:
            if response.status != 200:
                raise _refusal(path, response.status, await response.read())
            async for line in response.lines():
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                event = orjson.loads(line[5:])
                if "error" in event:
                    raise _refusal(path, int(event["error"].get("code") or 500), line[5:])
                yield event

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._answers(path):
            response = await self._http.post(path, body)
            if response.status != 200:
                raise _refusal(path, response.status, response.content)
            return orjson.loads(response.content)

    async def _admin(self, path: str, body: dict[str, Any] | None = None) -> None:
        await self._post(f"{(self._admin_url or '').rstrip('/')}{path}", body)

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
                f"vLLM's answer to {path} is not understood: {type(error).__name__}: {error}; supported are 0.30 to 0.33",
                reason="engine_error",
            ) from error

    async def _probe(self) -> Identity:
        async with self._answers("/v1/models"):
            version = orjson.loads((await self._http.get("/version")).content)["version"]
            models = {m["id"]: m for m in orjson.loads((await self._http.get("/v1/models")).content)["data"]}
        if self._model not in models:
            raise ProviderError(
                f"vLLM at {self._url} serves {sorted(models)}, not {self._model!r}; set gateway.model_name",
                reason="engine_error",
            )
        async with self._answers("/v1/chat/completions/render"):
            render = await self._http.post("/v1/chat/completions/render", self._chat(_PROBE_CHAT))
        self._has_scale_out = render.status not in _CLOSED
        if not self._has_scale_out:
            _log.warning(
                "vLLM has no render and generate routes; start it with --enable-scale-out for exact versions"
            )
        probe_ids = await self.render(_PROBE_CHAT)
        body = {"model": self._model, "prompt": _PROBE_TEXT, "add_special_tokens": False}
        text_ids = (await self._post("/tokenize", body))["tokens"]
        async with self._answers("/tokenizer_info"):
            info = await self._http.get("/tokenizer_info")
        template = orjson.loads(info.content).get("chat_template") if info.status == 200 else None
        return Identity(
            engine="vllm",
            engine_version=str(version),
            model=self._model,
            encoding=Encoding(
                tokenizer_digest=digest_ids(pack_ids(text_ids)),
                chat_template_digest=digest_json(template) if template else digest_ids(pack_ids(probe_ids)),
                template_kwargs_digest=digest_json({}),
                parser="vllm" if self._has_scale_out else ("" if self._parser == "none" else self._parser),
            ),
            vocabulary_tokens=None,
            max_context_tokens=int(models[self._model]["max_model_len"]),
            semantics=await self._probe_semantics(probe_ids),
        )

    async def _probe_semantics(self, prompt_ids: Ids) -> LogprobSemantics:
        """Ask for one token at temperature 1 and at 0.5 and compare what the likeliest tokens are said to weigh."""
        tables = []
        for temperature in (1.0, 0.5):
            path, body = self._request(prompt_ids, SamplingParams(temperature, 1.0, -1, 1, seed=0), "probe")
            params = body.get("sampling_params", body)
            params["logprobs"] = _PROBE_LOGPROBS
            del body["request_id"]
            answer = await self._post(path, {**body, "stream": False, "stream_options": None})
            tables.append(_top(answer["choices"][0]["logprobs"]))
        found = tell_semantics(*tables, ratio=2.0)
        if found is not LogprobSemantics.PROCESSED:
            _log.warning("vLLM's log-probabilities are %s; start it with --logprobs-mode processed_logprobs", found)
        return found


def _ids(values: Any) -> Ids:
    return np.array(values, dtype=np.uint32)


def _logprobs(values: dict[str, Any] | None) -> list[float | None]:
    """Chosen log-probabilities of a choice, in either route's shape."""
    if not values:
        return []
    if "token_logprobs" in values:
        return list(values["token_logprobs"] or ())
    return [item.get("logprob") for item in values.get("content") or ()]


def _top(values: dict[str, Any]) -> dict[Any, float]:
    """Log-probabilities of the likeliest first tokens, in either route's shape."""
    if "token_logprobs" in values:
        return dict(values["top_logprobs"][0])
    return {item["token_id"]: item["logprob"] for item in values["content"][0]["top_logprobs"]}


def _message(message: dict[str, Any], call_id: str) -> dict[str, Any]:
    """A derendered message: no empty fields, and ids of tool calls that a replay would give again."""
    shown: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("reasoning"):
        shown["reasoning_content"] = message["reasoning"]
    calls = message.get("tool_calls")
    if calls:
        shown["tool_calls"] = [
            {"id": f"call_{call_id}-{index}", "type": "function", "function": call["function"]}
            for index, call in enumerate(calls)
        ]
    elif shown["content"] is None:
        shown["content"] = ""
    return shown


def _refusal(path: str, status: int, body: bytes) -> ProviderError:
    """vLLM's error answer as ours."""
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body[:500].decode(errors="replace")
    if status == 400 and ("maximum context length" in message or "maximum model length" in message):
        reason = "context_length"
    else:
        reason = "bad_request" if status in (400, 422) else "engine_error"
    return ProviderError(f"vLLM answers {status} to {path}: {message}", reason=reason)
