"""SGLang over HTTP: `/tokenize` → ids → `/generate` → our own parser.

The prompt goes in as ids, and the sampled ids, their log-probabilities and the weight spans come from one stream. Each event
holds all that was sampled so far, or only what is new where the server was started with `--incremental-streaming-output`; which
one is asked at the start. The whole prompt is never asked back, since every event would hold it: the server's count of prompt
tokens shows whether it cut the prompt.

Log-probabilities are of the distribution that was sampled from, unless the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`;
the probe finds it out.

Source: SGLang 0.5.23, `entrypoints/http_server.py`, `managers/{io_struct,tokenizer_manager}.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from rollstream.errors import ProviderError
from rollstream.producers.engines.base import Answer, Conversation, Finish, Identity, Ids, LabelSpan
from rollstream.producers.engines.http import EngineHttp
from rollstream.producers.engines.probe import PROBE_CHAT, PROBE_LOGPROBS, PROBE_TEXT, PROBE_TOOLS, fingerprint
from rollstream.producers.engines.semantics import tell_semantics
from rollstream.producers.engines.served import HttpEngine, as_ids
from rollstream.producers.parsers import PARSERS, to_message
from rollstream.schemas.identity import digest_ids, digest_json
from rollstream.schemas.records import Encoding, LogprobSemantics, SamplingParams
from rollstream.schemas.types import pack_ids
from rollstream.settings import GatewaySettings

_log = logging.getLogger(__name__)
_PAUSES = {"abort": "abort", "keep": "in_place"}
"""Our pause modes → SGLang's; `wait` needs none, for an update waits for running requests."""


class SglangEngine(HttpEngine):
    """An SGLang server; see the module."""

    title = "SGLang"
    supported = "0.5.23"

    def __init__(self, gateway: GatewaySettings, *, http: EngineHttp | None = None) -> None:
        """Args: http: for tests."""
        super().__init__(gateway, http=http)
        self._is_incremental = False
        self._prompt_tokens: dict[int, int] = {}

    async def render(self, conversation: Conversation) -> Ids:
        """As in `Engine`."""
        async with self._answers("/tokenize"):
            return as_ids((await self._post("/tokenize", self._chat(conversation)))["tokens"])

    async def encode(self, text: str) -> Ids:
        """As in `Engine`."""
        async with self._answers("/tokenize"):
            return as_ids((await self._post("/tokenize", {"model": self._model, "prompt": text}))["tokens"])

    async def decode(self, ids: Sequence[int]) -> str:
        """As in `Engine`."""
        body = {"model": self._model, "tokens": list(ids), "skip_special_tokens": True}
        async with self._answers("/detokenize"):
            return str((await self._post("/detokenize", body))["text"])

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        """As in `Engine`. Raises: ProviderError: also where the server was conditioned on another number of tokens."""
        self._prompt_tokens[id(answer)] = len(prompt_ids)
        try:
            await super().generate(prompt_ids, sampling, request_id, answer)
        finally:
            del self._prompt_tokens[id(answer)]

    async def parse(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        """As in `Engine`."""
        return to_message(PARSERS[self._parser](text or await self.decode(ids)), f"call_{call_id}")

    def _chat(self, conversation: Conversation) -> dict[str, Any]:
        """The body of a request that renders as a chat completion would be rendered."""
        body: dict[str, Any] = {"model": self._model, "messages": conversation.messages}
        if conversation.tools:
            body["tools"] = conversation.tools
            body["tool_choice"] = conversation.tool_choice or "auto"
        if conversation.template_kwargs:
            body["chat_template_kwargs"] = conversation.template_kwargs
        return body

    def _request(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "input_ids": prompt_ids.tolist(),
            "rid": request_id,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,  # 0 would turn the prefix cache off
            "top_logprobs_num": 0,
            "sampling_params": {
                "n": 1,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "max_new_tokens": sampling.max_tokens,
                "min_new_tokens": 0,
                "stop": list(sampling.stop),
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": sampling.seed,
                "ignore_eos": False,
                "skip_special_tokens": True,
            },
        }

    def _take(self, event: dict[str, Any], answer: Answer) -> None:
        info = event["meta_info"]
        sent, used = self._prompt_tokens.get(id(answer)), info.get("prompt_tokens")
        if sent is not None and used is not None and used != sent:
            raise ProviderError(
                f"SGLang was conditioned on {used} tokens, and the prompt has {sent}; start it without --allow-auto-truncate",
                reason="engine_error",
            )
        ids, text = event.get("output_ids") or [], event.get("text") or ""
        logprobs = [entry[0] for entry in info.get("output_token_logprobs") or ()]
        if ids and answer.first_token_at_ms is None:
            answer.first_token_at_ms = time.time_ns() // 1_000_000
        if self._is_incremental:
            answer.ids.extend(ids)
            answer.logprobs.extend(logprobs)
            answer.text += text
        else:
            answer.ids[:], answer.logprobs[:], answer.text = ids, logprobs, text
        reason = info.get("finish_reason")
        if not reason:
            return
        matched = reason.get("matched")
        answer.finish = Finish(
            reason=_reason(reason),
            spans=tuple(
                LabelSpan(span["start"], span["end"], str(span["version"]))
                for span in info.get("weight_versions") or ()
            ),
            output_tokens=info.get("completion_tokens"),
            stop_string=matched if isinstance(matched, str) else None,
        )

    async def _load(self, version: int, path: str) -> None:
        """Pause or drain, take the label away, load with the cache flushed, label, continue."""
        pause = _PAUSES.get(self._pause_mode)
        if pause is None:
            await self._drained()
        else:
            await self._admin("/pause_generation", {"mode": pause})
        try:
            await self._relabel(f"loading-{version}")
            self._version = None
            # with `in_place` the running requests hold the cache, which SGLang then cannot flush
            body = {"model_path": path, "flush_cache": pause != "in_place", "abort_all_requests": False}
            await self._admin("/update_weights_from_disk", body)
            await self._relabel(str(version))
            self._version = version
        finally:
            if pause is not None:
                await self._admin("/continue_generation", {})

    async def _relabel(self, label: str) -> None:
        await self._admin("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def _label(self) -> str | None:
        label = (await self._get("/model_info")).get("weight_version")
        return None if label is None else str(label)

    async def _probe(self) -> Identity:
        model, server = await self._get("/model_info"), await self._get("/server_info")
        models = {one["id"]: one for one in (await self._get("/v1/models"))["data"]}
        if self._model not in models:
            raise ProviderError(
                f"SGLang at {self._url} serves {sorted(models)}, not {self._model!r}; set gateway.model_name",
                reason="engine_error",
            )
        self._is_incremental = bool(server.get("incremental_streaming_output"))
        probe_ids = await self.render(PROBE_CHAT)
        body = {"model": self._model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        text_ids = (await self._post("/tokenize", body))["tokens"]
        tools = await self._tried("/tokenize", self._chat(PROBE_TOOLS))
        return Identity(
            engine="sglang",
            engine_version=str(server["version"]),
            model=self._model,
            encoding=Encoding(
                tokenizer_digest=digest_ids(pack_ids(text_ids)),
                chat_template_digest=digest_ids(pack_ids(probe_ids)),
                template_kwargs_digest=digest_json({}),
                parser="" if self._parser == "none" else self._parser,
            ),
            vocabulary_tokens=None,
            max_context_tokens=int(models[self._model]["max_model_len"]),
            semantics=await self._probe_semantics(probe_ids),
            fingerprint=fingerprint(
                tokens=text_ids,
                prompts=[probe_ids.tolist(), tools["tokens"] if tools else []],
                template=None,
                parsers=[self._parser, model.get("tool_call_parser"), model.get("reasoning_parser")],
                message=None,
            ),
        )

    async def _probe_semantics(self, prompt_ids: Ids) -> LogprobSemantics:
        """Ask for one token at temperature 1 and at 0.5 and compare what the likeliest tokens are said to weigh."""
        tables = []
        for temperature in (1.0, 0.5):
            path, body = self._request(prompt_ids, SamplingParams(temperature, 1.0, -1, 1, seed=0), "probe")
            del body["rid"]
            answer = await self._post(path, {**body, "stream": False, "top_logprobs_num": PROBE_LOGPROBS})
            tables.append({entry[1]: entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]})
        found = tell_semantics(*tables, ratio=2.0)
        if found is not LogprobSemantics.PROCESSED:
            _log.warning("SGLang's log-probabilities are %s; start it without SGLANG_RETURN_ORIGINAL_LOGPROB", found)
        return found


def _reason(reason: dict[str, Any]) -> str:
    """SGLang's word for the end: an abort with an error's status is an error."""
    kind = str(reason.get("type") or "")
    return "error" if kind == "abort" and (reason.get("status_code") or 0) >= 400 else kind
