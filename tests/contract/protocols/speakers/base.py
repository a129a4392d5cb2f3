"""What the suite asks of a client: say a conversation, hear an answer, whatever the protocol.

A speaker is one file here with a class of this shape, and one line in `__init__.py`. It uses the official client as anybody
would, with no retries of the client's own, and echoes an earlier answer as that client gave it (`Heard.raw`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

What = Literal["system", "tools", "thoughts", "images", "stop", "count", "seed"]
"""Abilities that not every protocol has."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema."""


@dataclass(frozen=True)
class HeardCall:
    """A tool call, as the client shows it."""

    id: str
    name: str
    arguments: Any
    """Parsed."""


@dataclass(frozen=True)
class Heard:
    """An answer, as the client shows it."""

    id: str
    """Id of the answer: the call's."""
    text: str
    calls: tuple[HeardCall, ...]
    end: Literal["stop", "tools", "length", "stop_string"]
    """A protocol that has no word for a stop string says `stop`."""
    prompt_tokens: int
    output_tokens: int
    raw: Any
    """What the client needs to send the answer back as part of a conversation."""
    thoughts: str = ""


@dataclass(frozen=True)
class User:
    """A turn of the user. `image`: base64 of a PNG that goes with it."""

    text: str
    image: str | None = None


@dataclass(frozen=True)
class Results:
    """The results of all tool calls of the answer before: call → text."""

    results: Sequence[tuple[HeardCall, str]]


Turn = User | Heard | Results


@dataclass(frozen=True)
class Talk:
    """A conversation."""

    turns: Sequence[Turn]
    system: str | None = None
    tools: Sequence[Tool] = ()


@dataclass(frozen=True)
class Wishes:
    """Sampling parameters; None leaves them out."""

    max_tokens: int | None = None
    temperature: float | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Fields that no version of the protocol knows."""


@dataclass(frozen=True)
class Failed:
    """An error, as the client shows it."""

    status: int | None
    """HTTP status; None for an error within a stream."""
    text: str
    """Everything that the client shows of it."""
    is_overflow: bool
    """Whether agents that speak this protocol would recognise a full context (gateway.md §3.3)."""
    retry_after_s: float | None = None
    """What the answer says about coming again."""


class Speaker(Protocol):
    """An official client."""

    protocol: str
    """The protocol's name in records."""
    can: frozenset[What]
    """Its abilities."""
    path: str
    """Where its calls go, below the attempt's root; for requests made by hand."""
    body: Mapping[str, Any]
    """A smallest request that says hi; for requests made by hand."""

    def __init__(self, root_url: str, api_key: str) -> None:
        """Args: root_url: `root_url` of an opened rollout."""

    async def ask(self, talk: Talk, *, stream: bool, wishes: Wishes = Wishes()) -> Heard:
        """Send the conversation; streamed answers are put together as the client does it. Raises: the client's errors."""

    async def count(self, talk: Talk) -> int:
        """The number of prompt tokens. Only with the ability `count`."""

    def failed(self, error: BaseException) -> Failed:
        """What an error says. Raises: the error itself, if it is none of the client's."""

    async def close(self) -> None:
        """Close the connections."""
