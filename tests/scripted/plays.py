"""What a scripted engine samples for one request, and how it may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Span = tuple[int, int, str]
"""First token, one past the last, weight label."""


@dataclass(frozen=True)
class Asked:
    """A generate request, as the engine reads it."""

    prompt_ids: list[int]
    """The prompt."""
    prompt: str
    """Its text, special tokens left out."""
    request_id: str
    """The request's id: call id and attempt."""
    max_tokens: int
    """Most tokens."""
    stop: tuple[str, ...]
    """Stop strings."""
    params: dict[str, object]
    """Sampling parameters as sent."""


@dataclass(frozen=True)
class Play:
    """One answer.

    The engine honours the request's token limit and stop strings; everything else happens as it stands here.
    """

    text: str = "ok"
    """What is sampled, in its canonical split, with the end token behind it; see `ids`."""
    ids: Sequence[int] | None = None
    """What is sampled, exactly; None samples `text`. The end token has to be among them."""
    chunk_tokens: int = 4
    """Tokens of one event of the stream."""
    logprobs: Sequence[float | None] | Callable[[int], float] = lambda index: -0.5 - 0.001 * index
    """Log-probability of each token, or a function of its place."""
    reason: str | None = None
    """How it ends, in vLLM's word; None is `stop`, or `length` where the limit cuts it."""
    spans: Sequence[Span] | None = None
    """Weight versions; None is the engine's label for all tokens, empty sends none."""
    echo: Sequence[int] | None = None
    """The prompt that the engine says it was given; None is the true one."""
    counted: int | None = None
    """The number of tokens that it says it sampled; None is the true one."""
    hidden_chunks: frozenset[int] = field(default_factory=frozenset)
    """Chunks that are not sent."""
    status: int = 200
    """Another one refuses the request, with `text` as the message."""
    dies_after: int | None = None
    """Close the connection once this many chunks were sent."""
    fails_after: int | None = None
    """Send an error event once this many chunks were sent."""
    waits_after: int | None = None
    """Wait for `ScriptedEngine.go` once this many chunks were sent."""


def tool_call(name: str, arguments: str) -> str:
    """The text of a tool call as the `hermes` parser reads it. Args: arguments: JSON, to the character."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thought(text: str) -> str:
    """The text of a thought as the parser reads it."""
    return f"<think>{text}</think>"
