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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollstream.errors import ProviderError
from rollstream.producers.engines.adapters import Adapter, adapter_name, adapter_spans, digest_adapter
from rollstream.producers.engines.base import Answer, Conversation, Finish, Identity, Ids, LabelSpan
from rollstream.producers.engines.http import EngineHttp
from rollstream.producers.engines.probe import (
    PROBE_ANSWER,
    PROBE_CHAT,
    PROBE_LOGPROBS,
    PROBE_TEXT,
    PROBE_TOOLS,
    fingerprint,
)
from rollstream.producers.engines.semantics import tell_semantics
from rollstream.producers.engines.served import HttpEngine, as_ids
from rollstream.producers.parsers import PARSERS, to_message
from rollstream.schemas.identity import digest_ids, digest_json
from rollstream.schemas.records import Encoding, LogprobSemantics, SamplingParams
from rollstream.schemas.types import pack_ids
from rollstream.settings import GatewaySettings

_log = logging.getLogger(__name__)
_CLOSED = (403, 404, 405)
"""What vLLM answers on routes that are not served."""


class VllmEngine(HttpEngine):
    """A vLLM server; see the module."""

    title = "vLLM"
    supported = "0.30 to 0.33"

    def __init__(self, gateway: GatewaySettings, *, http: EngineHttp | None = None) -> None:
        """Args: http: for tests."""
        super().__init__(gateway, http=http)
        self._has_scale_out = False
        self._is_adapter = gateway.engine_weights == "adapter"
        self._adapter: Adapter | None = None
        self._adapters: dict[str, Adapter] = {}

    async def render(self, conversation: Conversation) -> Ids:
        """As in `Engine`."""
        path, body, field = self._render_request(conversation)
        async with self._answers(path):
            return as_ids((await self._post(path, body))[field])

    async def encode(self, text: str) -> Ids:
        """As in `Engine`."""
        async with self._answers("/tokenize"):
            return as_ids((await self._post("/tokenize", {"model": self._model, "prompt": text}))["tokens"])

    async def decode(self, ids: Sequence[int]) -> str:
        """As in `Engine`."""
        body = {"model": self._model, "tokens": list(ids)}
        async with self._answers("/detokenize"):
            return str((await self._post("/detokenize", body))["prompt"])

    async def parse(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        """As in `Engine`."""
        if not self._has_scale_out:
            return to_message(PARSERS[self._parser](text), f"call_{call_id}")
        path, body = self._derender(conversation, ids, prompt_ids.tolist(), call_id)
        async with self._answers(path):
            return _message((await self._post(path, body))["choices"][0]["message"], call_id)

    async def load_policy(self, version: int, weights_ref: str) -> None:
        """As in `Engine`. An adapter is loaded beside the others: running calls end on theirs, and nothing is paused."""
        if not self._is_adapter or self._admin_url is None:
            await super().load_policy(version, weights_ref)
            return
        async with self._loading:
            await self.start()
            path = weights_ref.removeprefix("file://")
            name = adapter_name(self._model, version)
            adapter = Adapter(name, version, path, await asyncio.to_thread(digest_adapter, path))
            if self._adapters.get(name, adapter) != adapter:
                raise ProviderError(
                    f"cannot load adapter {name!r} from {path!r}: it is loaded from {self._adapters[name].path!r} with other "
                    "files, and a name is never given twice; publish the weights as another version",
                    reason="bad_request",
                )
            await self._serve(adapter)
            self._adapter = self._adapters[name] = adapter
            self._version = version
            self._identity = replace(self.identity(), adapter=name, adapter_digest=adapter.digest)

    async def _serve(self, adapter: Adapter) -> None:
        """Have the server load an adapter, unless it has it."""
        models = {one["id"]: one for one in (await self._get("/v1/models"))["data"]}
        root = models.get(adapter.name, {}).get("root", adapter.path)
        if root != adapter.path:
            raise ProviderError(
                f"vLLM serves {adapter.name!r} from {root!r}, expected {adapter.path!r}; publish the weights as another version",
                reason="bad_request",
            )
        if adapter.name not in models:
            body = {"lora_name": adapter.name, "lora_path": adapter.path}
            await self._http_ok(self._admin_path("/v1/load_lora_adapter"), body)

    async def _http_ok(self, path: str, body: dict[str, Any]) -> None:
        """POST whose answer is a text."""
        async with self._answers(path):
            response = await self._http.post(path, body)
            if response.status != 200:
                raise self._refusal(path, response.status, response.content)

    def _render_request(self, conversation: Conversation) -> tuple[str, dict[str, Any], str]:
        """Path, body, and the answer's field that holds the ids."""
        if self._has_scale_out:
            return "/v1/chat/completions/render", self._chat(conversation), "token_ids"
        return "/tokenize", {**self._chat(conversation), "add_generation_prompt": True}, "tokens"

    def _derender(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: list[int], call_id: str
    ) -> tuple[str, dict[str, Any]]:
        choice = {"index": 0, "finish_reason": "stop", "token_ids": list(ids)}
        return "/v1/chat/completions/derender", {
            "model": self._model,
            "generate_response": {"request_id": call_id, "choices": [choice]},
            "prompt_tokens": len(prompt_ids),
            "prompt_token_ids": prompt_ids,
            "chat_request": self._chat(conversation),
        }

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
            "model": self._adapter.name if self._adapter else self._model,
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
                adapter = self._adapters.get(answer.served.adapter) if answer.served else None
                spans = adapter_spans(adapter, spans) if adapter else spans
        answer.finish = Finish(
            reason=reason,
            spans=spans,
            prompt_ids=as_ids(echoed) if echoed else finish.prompt_ids,
            output_tokens=usage["completion_tokens"] if usage else finish.output_tokens,
            stop_string=stop_string,
        )

    async def _load(self, version: int, path: str) -> None:
        """Pause, reload, clear the cache, label, resume. With `keep`, running calls are computed again from their ids."""
        mode = self._pause_mode
        await self._admin(f"/pause?mode={mode}")
        try:
            await self._admin("/update_weight_version", {"new_version": f"loading-{version}"})
            self._version = None
            await self._admin("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            answer = await self._admin("/reset_prefix_cache" + "?reset_running_requests=true" * (mode == "keep"))
            is_cleared = bool((answer or {}).get("success", True))  # before 0.33 the answer was empty
            if not is_cleared:
                raise ProviderError(
                    f"vLLM did not clear its prefix cache, so version {version} would sample from what older weights computed; "
                    "publish it again",
                    reason="engine_error",
                )
            for running in self._sampling.values():
                running.cache_cleared = True
            await self._admin("/update_weight_version", {"new_version": str(version)})
            self._version = version
        finally:
            await self._admin("/resume")

    async def _label(self) -> str | None:
        if self._adapter is not None:
            return str(self._adapter.version)
        return (
            None
            if self._admin_url is None
            else str((await self._get(self._admin_path("/weight_info")))["weight_version"])
        )

    async def _is_paused(self) -> bool:
        if self._admin_url is None:
            return False
        return bool((await self._get(self._admin_path("/is_paused")))["is_paused"])

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
            render = await self._http.post("/v1/chat/completions/render", self._chat(PROBE_CHAT))
        self._has_scale_out = render.status not in _CLOSED
        if not self._has_scale_out:
            _log.warning(
                "vLLM has no render and generate routes; start it with --enable-scale-out for exact versions"
            )
        probe_ids = await self.render(PROBE_CHAT)
        body = {"model": self._model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        text_ids = (await self._post("/tokenize", body))["tokens"]
        async with self._answers("/tokenizer_info"):
            info = await self._http.get("/tokenizer_info")
        template = orjson.loads(info.content).get("chat_template") if info.status == 200 else None
        if self._adapter is not None:
            await self._serve(self._adapter)  # a server that was restarted has none
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
            fingerprint=fingerprint(
                tokens=text_ids,
                prompts=[probe_ids.tolist(), await self._probe_tools()],
                template=template,
                parsers=None if self._has_scale_out else self._parser,
                message=await self._probe_parsers() if self._has_scale_out else None,
            ),
            adapter=self._adapter.name if self._adapter else "",
            adapter_digest=self._adapter.digest if self._adapter else "",
        )

    async def _probe_tools(self) -> list[int]:
        """Ids of a conversation with tools; none where the template refuses it."""
        path, body, field = self._render_request(PROBE_TOOLS)
        answer = await self._tried(path, body)
        return list(answer[field]) if answer else []

    async def _probe_parsers(self) -> dict[str, Any] | None:
        """How the server's parsers read a text with a thought and a tool call; None where they refuse."""
        ids = await self._tried(
            "/tokenize", {"model": self._model, "prompt": PROBE_ANSWER, "add_special_tokens": False}
        )
        if not ids:
            return None
        answer = await self._tried(*self._derender(PROBE_TOOLS, ids["tokens"], [], "probe"))
        return _message(answer["choices"][0]["message"], "probe") if answer else None

    async def _probe_semantics(self, prompt_ids: Ids) -> LogprobSemantics:
        """Ask for one token at temperature 1 and at 0.5 and compare what the likeliest tokens are said to weigh."""
        tables = []
        for temperature in (1.0, 0.5):
            path, body = self._request(prompt_ids, SamplingParams(temperature, 1.0, -1, 1, seed=0), "probe")
            params = body.get("sampling_params", body)
            params["logprobs"] = PROBE_LOGPROBS
            del body["request_id"]
            answer = await self._post(path, {**body, "stream": False, "stream_options": None})
            tables.append(_top(answer["choices"][0]["logprobs"]))
        found = tell_semantics(*tables, ratio=2.0)
        if found is not LogprobSemantics.PROCESSED:
            _log.warning("vLLM's log-probabilities are %s; start it with --logprobs-mode processed_logprobs", found)
        return found


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
