"""What an inference engine is to the gateway: render messages to ids, sample from ids, parse ids to a message.

Ids go in and ids come out: the prompt is known before sampling, and the sampled ids, their log-probabilities and the versions
that sampled them come from one answer. An engine never repairs what it reports; the hard checks of `call.py` judge it.
Adding an engine: one file here with a class of this shape, and one branch in `make_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollstream.schemas.records import Encoding, LogprobSemantics, SamplingParams

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered: a request's messages and tools, as the client sent them."""

    messages: list[dict[str, Any]]
    """Chat messages. A tool call's arguments stay the string they are."""
    tools: list[dict[str, Any]] | None = None
    """Tools, or None."""
    tool_choice: Any = None
    """OpenAI's `tool_choice`, if the client gave one."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine is; part of every record."""

    engine: str
    """Kind, for instance `vllm`."""
    engine_version: str
    """Version."""
    model: str
    """Name of the model it serves."""
    encoding: Encoding
    """What turns messages into ids, with no template arguments."""
    vocabulary_tokens: int | None
    """Number of ids there are; None if the engine does not tell."""
    max_context_tokens: int
    """Most prompt and output tokens together."""
    semantics: LogprobSemantics
    """Which distribution its log-probabilities belong to."""
    fingerprint: str = ""
    """Digest of what decides which tokens a text is and which text the tokens are; empty if it is not known."""
    adapter: str = ""
    """Name of the LoRA adapter that samples; empty for the full weights."""
    adapter_digest: str = ""
    """Digest of the adapter's files, if known."""


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Output tokens [start, end) were sampled under this weight label."""

    start: int
    """First output token."""
    end: int
    """One past the last."""
    label: str
    """The engine's own label; a decimal integer is a policy version."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an engine's answer."""

    reason: str
    """The engine's own word: `stop`, `length`, `abort`, `error`."""
    spans: tuple[LabelSpan, ...] = ()
    """Which weights sampled what; empty if the engine did not say."""
    prompt_ids: Ids | None = None
    """The prompt as the engine echoes it; None if it does not."""
    output_tokens: int | None = None
    """The engine's own count of sampled tokens; None if it gives none."""
    stop_string: str | None = None
    """The stop string that ended the output; None if none did, or the engine does not say."""


@dataclass(slots=True)
class Answer:
    """What an engine has answered so far; filled while it samples, so that it holds what there is when a call is cut short."""

    ids: list[int] = field(default_factory=list)
    """Sampled ids, the end token included."""
    logprobs: list[float | None] = field(default_factory=list)
    """One each; None where the engine gave none."""
    text: str = ""
    """Their text, where the engine gives it along; only for showing."""
    first_token_at_ms: int | None = None
    """When the first token came, UTC epoch milliseconds; None if that is not known."""
    finish: Finish | None = None
    """The end; None while there is none."""
    pause_mode: str = ""
    """How the engine was paused while it sampled: `abort`, `wait` or `keep`; empty if it was not, as far as known."""
    cache_cleared: bool | None = None
    """Whether that pause cleared the prefix cache; None without a pause."""
    served: Identity | None = None
    """What the engine was when it began to sample, where that may be other than when the prompt was made."""


class Engine(Protocol):
    """An inference engine. Every method may raise ProviderError, with one of these reasons:

    `bad_request`: the client's fault. `context_length`: the prompt is too long. `engine_down`: could not be reached, nothing
    was sampled. `engine_error`: failed or answered nonsense.
    """

    async def start(self) -> None:
        """Get ready, and find out what the engine is. Does nothing where that is known already."""

    def identity(self) -> Identity:
        """What the engine is; only after `start`."""

    @property
    def version(self) -> int | None:
        """The policy version that a call started now would be sampled by; None if unknown. For reports, never for records."""

    async def render(self, conversation: Conversation) -> Ids:
        """The prompt's ids, shape [T]."""

    async def encode(self, text: str) -> Ids:
        """The ids of a text that is a prompt as it stands, shape [T]."""

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        """Sample into `answer`, whose `finish` is set at the end. Cancelling cancels the engine's work."""

    async def parse(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        """The assistant message in OpenAI's shape.

        Args: ids, text: the answer's; the text is empty where the engine gives none. call_id: for the ids of tool calls.
        """

    async def load_policy(self, version: int, weights_ref: str) -> None:
        """Serve these weights under this version; running requests end on the old ones first."""

    async def health(self) -> str | None:
        """Why the engine cannot serve now; None if it can."""

    async def close(self) -> None:
        """Let go of everything."""
