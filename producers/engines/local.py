"""A transformers model in this process, on the CPU: the engine of the demo and of tests.

One thread owns the model. Requests wait in a queue and are sampled together, whatever waits when the thread is free; new weights
are copied in between two batches, so a batch is sampled by one version. The log-probabilities are those of the distribution
that was drawn from (`batch.py`), and a test scores them again with a plain forward pass.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from rollstream.errors import ProviderError, SettingsError, boundary
from rollstream.producers.engines.base import Answer, Conversation, Finish, Identity, Ids, LabelSpan
from rollstream.producers.engines.batch import Job, sample_batch
from rollstream.producers.parsers import PARSERS, to_message
from rollstream.schemas.identity import digest_bytes, digest_json
from rollstream.schemas.records import Encoding, LogprobSemantics, SamplingParams
from rollstream.settings import GatewaySettings

_BATCH_ROWS = 64
"""Most requests sampled together; more would only make the first of them wait longer."""
_GATHER_S = 0.01
"""How long a batch waits for requests that are likely to come: those who were answered last usually ask again, some
milliseconds later. A step costs about the same for one row as for ten, so small batches are what costs."""


class LocalEngine:
    """An engine in this process; see the module."""

    def __init__(
        self, folder: Path, *, model_name: str = "policy", parser: str = "hermes", max_context_tokens: int = 2048
    ) -> None:
        """Load a model folder (config, model.safetensors, tokenizer with a chat template).

        Raises: ProviderError: the folder holds no model that transformers can load.
        """
        torch.set_num_threads(1)
        if not folder.is_dir():
            raise ProviderError(
                f"cannot load the model of gateway.model_path={str(folder)!r}: there is no such folder",
                reason="bad_model",
            )
        with boundary(ProviderError, f"load the model of {str(folder)!r}", reason="bad_model"):
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
            self._model.train(False)
            tokenizer_bytes = (folder / "tokenizer.json").read_bytes()
        self._backend = self._tokenizer.backend_tokenizer
        self._parse = PARSERS[parser]
        self._end_ids = _end_ids(self._model, self._tokenizer)
        self._version = 0
        limit = int(getattr(self._model.config, "max_position_embeddings", max_context_tokens))
        tokenizer, template = digest_bytes(tokenizer_bytes), digest_json(self._tokenizer.chat_template)
        self._identity = Identity(
            engine="local",
            engine_version=f"transformers-{transformers.__version__}",
            model=model_name,
            encoding=Encoding(
                tokenizer_digest=tokenizer,
                chat_template_digest=template,
                template_kwargs_digest=digest_json({}),
                parser="" if parser == "none" else parser,
            ),
            vocabulary_tokens=int(self._model.config.vocab_size),
            max_context_tokens=min(max_context_tokens, limit),
            semantics=LogprobSemantics.PROCESSED,
            fingerprint=digest_json(tokenizer, template, parser),
        )
        self._jobs: deque[tuple[Job, _Waiter]] = deque()
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._random = np.random.default_rng()
        self._thread: threading.Thread | None = None

    @classmethod
    def from_settings(cls, gateway: GatewaySettings) -> LocalEngine:
        """The engine that the settings describe."""
        if gateway.model_path is None:
            raise SettingsError("gateway.model_path is not set; the local engine needs the folder of a model")
        return cls(
            Path(gateway.model_path),
            model_name=gateway.model_name,
            parser=gateway.tool_parser,
            max_context_tokens=gateway.max_context_tokens,
        )

    @property
    def version(self) -> int | None:
        """As in `Engine`."""
        return self._version

    def identity(self) -> Identity:
        """As in `Engine`."""
        return self._identity

    async def start(self) -> None:
        """As in `Engine`: starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="local-engine", daemon=True)
            self._thread.start()

    async def render(self, conversation: Conversation) -> Ids:
        """As in `Engine`, by the model's chat template."""
        with boundary(ProviderError, "render these messages with the model's chat template", reason="bad_request"):
            text = self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=True,
                **conversation.template_kwargs,
            )
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    async def encode(self, text: str) -> Ids:
        """As in `Engine`."""
        return np.array(self._backend.encode(text).ids, dtype=np.uint32)

    async def decode(self, ids: Sequence[int]) -> str:
        """As in `Engine`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        """As in `Engine`; the answer is filled at the end, or with what there is when cancelled."""
        if not len(prompt_ids):
            raise ProviderError("the prompt is empty: the chat template rendered nothing", reason="bad_request")
        random = self._random if sampling.seed is None else np.random.default_rng(sampling.seed % 2**64)
        job = Job(prompt_ids, sampling, random.random(sampling.max_tokens))
        waiter = _Waiter()
        with self._wake:
            if self._is_closed or self._thread is None:
                raise ProviderError("the local engine is not running", reason="engine_down")
            self._jobs.append((job, waiter))
            self._wake.notify()
        try:
            version = await waiter.future
        except asyncio.CancelledError:
            job.is_cancelled = True
            count = len(job.logprobs)
            answer.ids, answer.logprobs = job.ids[:count], list(job.logprobs[:count])
            raise
        answer.ids, answer.logprobs = job.ids, list(job.logprobs)
        text = self._backend.decode(job.ids) if job.reason == "stop" and sampling.stop else ""
        answer.finish = Finish(
            reason=job.reason,
            spans=(LabelSpan(0, len(job.ids), str(version)),),
            prompt_ids=prompt_ids,
            output_tokens=len(job.ids),
            stop_string=next((stop for stop in sampling.stop if stop in text), None),
        )

    async def parse(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        """As in `Engine`."""
        return to_message(self._parse(await self.decode(ids)), f"call_{call_id}")

    async def load_policy(self, version: int, weights_ref: str) -> None:
        """As in `Engine`; `weights_ref` is a folder with a `model.safetensors`, or that file."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def load() -> None:
            try:
                copy_weights(self._model, weights_ref)
            except ProviderError as error:
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                self._version = version
                loop.call_soon_threadsafe(done.set_result, None)

        with self._wake:
            self._orders.append(load)
            self._wake.notify()
        await done

    async def health(self) -> str | None:
        """As in `Engine`."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return None if is_alive else "the local engine's thread does not run"

    async def close(self) -> None:
        """As in `Engine`; what waits fails."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        likely = 0
        while True:
            with self._wake:
                while not (self._jobs or self._orders or self._is_closed):
                    self._wake.wait()
                if not self._orders:
                    self._wake.wait_for(lambda: self._is_enough(likely), _GATHER_S)  # noqa: B023 - called before it changes
                if self._is_closed:
                    break
                order = self._orders.popleft() if self._orders else None
                taken = [] if order else [self._jobs.popleft() for _ in range(min(_BATCH_ROWS, len(self._jobs)))]
            if order:
                order()
                continue
            batch = [(job, waiter) for job, waiter in taken if not job.is_cancelled]
            if batch:
                self._run(batch)
                likely = len(batch) + len(self._jobs)
        _wake_all([waiter for _, waiter in self._jobs], None, "the local engine was closed")

    def _is_enough(self, likely: int) -> bool:
        return len(self._jobs) >= min(likely, _BATCH_ROWS) or bool(self._orders) or self._is_closed

    def _run(self, batch: list[tuple[Job, _Waiter]]) -> None:
        problem = None
        try:
            with boundary(ProviderError, "sample from the local model", reason="engine_error"):
                sample_batch(
                    self._model, [job for job, _ in batch], end_ids=self._end_ids, decode=self._backend.decode
                )
        except ProviderError as error:
            problem = str(error)
        _wake_all([waiter for _, waiter in batch], self._version, problem)


class _Waiter:
    """A future of the event loop that the engine's thread fulfils, many in one wake-up."""

    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[int] = self.loop.create_future()


def copy_weights(model: torch.nn.Module, weights_ref: str) -> None:
    """Copy the weights of a folder into a live model; all of them or, on any error, none.

    Raises: ProviderError: reason `bad_weights`.
    """
    path = Path(weights_ref.removeprefix("file://"))
    file = path / "model.safetensors" if path.is_dir() else path
    with boundary(ProviderError, f"load weights from {str(file)!r}", reason="bad_weights"):
        found = load_file(file)
    wanted = model.state_dict()
    tied = {name for name in wanted if name not in found and _is_alias(wanted, name, found)}
    missing, unknown = wanted.keys() - found.keys() - tied, found.keys() - wanted.keys()
    misshapen = sorted(name for name in found if name in wanted and found[name].shape != wanted[name].shape)
    if missing or unknown or misshapen:
        raise ProviderError(
            f"cannot load weights from {str(file)!r}: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}, "
            f"of another shape {misshapen[:3]}; expected the weights of the served model",
            reason="bad_weights",
        )
    with torch.no_grad():
        for name, values in found.items():
            wanted[name].copy_(values)


def _is_alias(state: dict[str, torch.Tensor], name: str, found: dict[str, torch.Tensor]) -> bool:
    """Whether a parameter shares its memory with one that is there (tied embeddings are stored once)."""
    return any(state[other].data_ptr() == state[name].data_ptr() for other in found if other in state)


def _end_ids(model: transformers.PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(end for end in (*ends, tokenizer.eos_token_id) if end is not None)


def _wake_all(waiters: list[_Waiter], version: int | None, problem: str | None) -> None:
    """Fulfil the futures of a batch: one wake-up of each event loop."""
    for loop in {waiter.loop for waiter in waiters}:
        mine = [waiter.future for waiter in waiters if waiter.loop is loop]
        try:
            loop.call_soon_threadsafe(partial(_fulfil, mine, version, problem))
        except RuntimeError:  # that loop is closed: nobody waits there
            continue


def _fulfil(futures: list[asyncio.Future[int]], version: int | None, problem: str | None) -> None:
    for future in futures:
        if future.done():
            continue
        if problem is not None or version is None:
            future.set_exception(ProviderError(problem, reason="engine_error"))
        else:
            future.set_result(version)
