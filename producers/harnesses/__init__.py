"""Harnesses: what each has to be told so that its calls go through a rollout, and `rollstream run`, which tells it.

`base.py` says what a recipe is; docs/harnesses.md describes each for its users.
"""

from __future__ import annotations

from pathlib import Path

from rollstream.producers.harnesses.base import Recipe
from rollstream.producers.harnesses.claude import claude
from rollstream.producers.harnesses.codex import codex
from rollstream.producers.harnesses.command import command
from rollstream.producers.harnesses.openclaw import openclaw
from rollstream.producers.harnesses.pi import pi

RECIPES: dict[str, Recipe] = {
    "claude": claude,
    "codex": codex,
    "command": command,
    "openclaw": openclaw,
    "pi": pi,
}
"""Name of the program → recipe; `command` is for all others."""


def recipe_for(program: str) -> Recipe:
    """The recipe for a program, by the last part of its path."""
    return RECIPES.get(Path(program).name, command)
