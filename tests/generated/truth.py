"""What really happened to the calls of a generated rollout: numbers and words only, seen from the engine and from the client.

The player writes it while it plays, from what its own engine and client did. The checker reads it beside the records. Neither
side takes anything from a record here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request, and what the engine did for it."""

    body: str
    """What was asked; equal texts are equal requests."""
    arrived: int
    """When it came: its place among all arrivals and ends of the rollout."""
    ended: int
    """When its client had an answer, or had none for good; same counting."""
    is_marked: bool
    """Whether the client said that it sends this again."""
    prompt: tuple[int, ...]
    """The ids that the engine was conditioned on, or would have been."""
    ids: tuple[Any, ...]
    """Everything the engine gave as sampled ids."""
    logprobs: tuple[Any, ...]
    """Everything it gave as log-probabilities."""
    how: str
    """How it ended: `stop`, `stop_string`, `length`, `abort`, `update` (aborted for new weights), `error` (its word), `died`,
    `left` (the client, while the engine sampled), `refused` (by the engine, at once), `overflow` (the prompt did not fit)."""
    spans: tuple[tuple[int, int, str], ...]
    """First token, one past the last, label; only where the engine came to its end."""
    echoed: tuple[int, ...] | None
    """The prompt as the engine said it back; None if it did not."""
    counted: int | None
    """The number of tokens that it said it sampled; None if it did not."""
    versions: tuple[int | None, int | None]
    """The version it was taken to serve when the call began and when it ended."""
    semantics: str
    """`processed`, `raw` or `unknown`."""
    temperature: float
    """How the request is tempered."""
    vocabulary: int | None
    """Number of ids there are; None if the engine does not tell."""
    sent: str
    """`whole`: the client got it. `part`: the connection broke while it was sent. `no`: nothing was sent."""

    @property
    def is_answered(self) -> bool:
        """Whether there was an answer to send."""
        return self.how in ("stop", "stop_string", "length")
