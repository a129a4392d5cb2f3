"""What a client protocol is to the gateway, and what passes between the two. A protocol is one file of pure functions.

A request comes in as `Incoming` and leaves `Dialect.parse` as an `Exchange`: what to sample (`Request`), and how to write the
answer (`whole`, or a `Stream`). Everything between, which is keys, limits, rendering, sampling, records and acknowledgements, is
the gateway's, and the same for all. Adding a protocol: one file here with a class of this shape, and one line in `__init__.py`;
`tests/contract/protocols` runs over all of them.

Permissive on what comes in: unknown fields are ignored, what cannot be honoured is a `RequestRefused` that names the field.
Strict on what goes out: it is what the protocol's official client takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rollstream.producers.engines.base import Conversation
from rollstream.schemas.records import SamplingParams


class Problem(StrEnum):
    """Why a request gets an error; each protocol has words and a shape of its own for each."""

    INVALID = "invalid"
    """The body or a field of it is wrong, or asks for what is not served."""
    OVERFLOW = "overflow"
    """The prompt does not fit the context; agents compact their conversation when they recognise this."""
    UNAUTHENTICATED = "unauthenticated"
    """No key, or one that does not open this rollout."""
    NOT_FOUND = "not_found"
    """No such route."""
    METHOD = "method"
    """The route takes another method."""
    TOO_LARGE = "too_large"
    """The request has too many bytes."""
    RATE_LIMITED = "rate_limited"
    """Too many calls at once; come again later."""
    INTERNAL = "internal"
    """A fault of the gateway."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed within the call."""
    UNAVAILABLE = "unavailable"
    """Nobody can serve now: the engine is away or paused, Kafka does not acknowledge, the call was aborted. Come again."""


STATUS = {
    Problem.INVALID: 400,
    Problem.OVERFLOW: 400,
    Problem.UNAUTHENTICATED: 401,
    Problem.NOT_FOUND: 404,
    Problem.METHOD: 405,
    Problem.TOO_LARGE: 413,
    Problem.RATE_LIMITED: 429,
    Problem.INTERNAL: 500,
    Problem.ENGINE_FAILED: 502,
    Problem.UNAVAILABLE: 503,
}
"""HTTP status of each problem, where a protocol has no other."""


class RequestRefused(Exception):
    """A request that gets an error answer. Control flow: carries what the answer says."""

    def __init__(
        self,
        message: str,
        *,
        problem: Problem = Problem.INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Args: code: reason code of `docs/reasons.md`. param: the field at fault. retry_after_s: when to come again."""
        super().__init__(message)
        self.problem = problem
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as HTTP brings it; its key has been checked."""

    body: bytes
    """The body."""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    """Headers by lower-case name."""
    path: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the route, such as `model`."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Parameters behind the question mark."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client says about sampling; None or empty where it says nothing.

    The server decides `top_p=1`, `top_k=-1` and no penalties: with a truncated or penalised distribution the log-probabilities
    would need the mask of what was left. What it decides otherwise stands in `overruled`.
    """

    temperature: float | None = None
    """Temperature."""
    max_tokens: int | None = None
    """Most tokens to sample."""
    seed: int | None = None
    """Seed."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    overruled: Mapping[str, Any] = field(default_factory=dict)
    """Parameters by their names in the protocol, such as `top_p`, that were asked for and do not count."""

    def effective(self, *, temperature: float, max_tokens: int, room_tokens: int) -> SamplingParams:
        """The sampling parameters that are used.

        Args: temperature, max_tokens: where the client named none. room_tokens: what the context leaves; at least 1.
        """
        return SamplingParams(
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=1.0,
            top_k=-1,
            max_tokens=min(self.max_tokens or max_tokens, room_tokens),
            seed=self.seed,
            stop=self.stop,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for, whatever the protocol."""

    prompt: Conversation | str | tuple[int, ...]
    """A conversation to render; or a text or ids that are the prompt as they stand (Completions)."""
    model: str
    """Model name as sent; recorded, never used."""
    wishes: Wishes
    """What is said about sampling."""
    is_stream: bool
    """Whether the answer is a stream."""
    digest: str
    """Of the body without what does not change the answer, from `digest_request`; equal digests are retries of each other."""


class End(StrEnum):
    """How an answer ended; an answer that was cut off otherwise is an error, never one of these."""

    STOP = "stop"
    """By the model."""
    STOP_STRING = "stop_string"
    """By a stop string of the client."""
    LENGTH = "length"
    """By the token limit."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as sampled."""

    id: str
    """Unique within the rollout; equal for a replay."""
    name: str
    """The function, by the name that the conversation's tools give it."""
    arguments: str
    """The very characters that were sampled: JSON if the model wrote JSON, perhaps cut short where the end is LENGTH."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The answer to a call, as far as a client may see it."""

    call_id: str
    """The call; every protocol shows it as the id of its answer, so that events can name it."""
    created_s: int
    """When the call began, UTC epoch seconds."""
    model: str
    """Name of the served model."""
    content: str
    """Text; may be empty."""
    reasoning: str
    """The thought before it; empty for none."""
    tool_calls: tuple[ToolCall, ...]
    """Tool calls, in order."""
    end: End
    """How it ended."""
    stop_string: str | None
    """Which stop string, where the end is STOP_STRING and the engine says."""
    prompt_tokens: int
    """Ids of the prompt."""
    output_tokens: int
    """Sampled ids, the end token included."""


class Stream(Protocol):
    """The events of one streamed answer, in order; keeps what the protocol counts, such as a sequence number.

    Whichever method is called first also writes what a stream of this protocol begins with. `end` or `fail` is the last.
    """

    @property
    def media_type(self) -> str:
        """Content type of the stream."""

    def keep_alive(self) -> bytes:
        """Bytes that keep the connection alive and say nothing; sent every few seconds while there is no answer."""

    def end(self, shown: Shown) -> bytes:
        """The answer and its end."""

    def fail(self, refusal: RequestRefused) -> bytes:
        """An error after the stream has begun, so that no client takes it for an end."""


class Exchange(Protocol):
    """One request, and how it is answered. May hold what its answer needs of the request, such as renamed tools."""

    @property
    def request(self) -> Request:
        """What to sample."""

    def whole(self, shown: Shown) -> bytes:
        """The answer as one JSON body."""

    def stream(self, call_id: str, created_s: int, model: str) -> Stream:
        """A stream for the answer to come. Only where `request.is_stream`. Args: as the fields of `Shown`."""


class Surface(Protocol):
    """What every kind of route of a protocol has."""

    @property
    def routes(self) -> tuple[str, ...]:
        """Paths below `/r/{rollout_id}/a/{attempt}`, in Starlette's form."""

    @property
    def key_headers(self) -> tuple[bytes, ...]:
        """Headers in which this protocol's clients send their key, first one first; `authorization` means a bearer token."""

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request that no route takes comes from a client of this protocol. Args: path: below the attempt's root."""

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """HTTP status and body of an error answer."""


class Dialect(Surface, Protocol):
    """A protocol's calls."""

    @property
    def protocol(self) -> str:
        """Name in records, for instance `openai-chat`."""

    @property
    def version(self) -> str:
        """Counts up when the same body would be turned into other messages, or the same tokens into another answer."""

    def parse(self, incoming: Incoming) -> Exchange:
        """Read a request. Raises: RequestRefused."""


class TokenCounter(Surface, Protocol):
    """A protocol's question how many tokens a prompt would have; answered by rendering, never recorded as a call."""

    def parse(self, incoming: Incoming) -> Conversation:
        """Read a request. Raises: RequestRefused."""

    def counted(self, prompt_tokens: int) -> bytes:
        """The answer."""


class ModelCatalog(Surface, Protocol):
    """A protocol's list of models. Two protocols may share a path; the one whose client asks answers."""

    def listed(self, models: tuple[str, ...]) -> bytes:
        """The answer to the list."""

    def described(self, model: str) -> bytes:
        """The answer to one model, whatever its name: harnesses ask for several."""
