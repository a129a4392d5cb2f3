"""What a harness has to be told so that its model calls go through a rollout. A harness is one pure function in one file.

Adding one: a file here with a function of the shape of `Recipe`, one line in `__init__`, and a section in docs/harnesses.md. A
recipe knows no process, file system or network: `run.py` has them. Keys go into the environment alone, since arguments can be
seen by every process of the machine, and files outlive a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEY_VARIABLE = "ROLLOUT_API_KEY"
"""Holds the rollout's key in the environment of every command."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rollout as its harness sees it."""

    root_url: str
    """Base URL for clients of Anthropic's and Google's protocols."""
    api_key: str
    """The rollout's key."""
    model: str
    """Model name that the harness asks for; recorded, never used."""
    context_tokens: int | None
    """Most tokens of prompt and answer, so that a harness compacts in time; None leaves it at the harness's own idea."""
    home: Path
    """A folder for the harness's settings and state, for this run alone."""

    @property
    def openai_url(self) -> str:
        """Base URL for clients of OpenAI's protocols."""
        return f"{self.root_url}/v1"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a command is started with."""

    environment: Mapping[str, str | None]
    """Variables on top of what every command has; None takes one away."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the home → text."""


Recipe = Callable[[Place], Setup]
"""How a harness is told of a place."""
