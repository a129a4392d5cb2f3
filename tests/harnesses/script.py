"""What the model says in a harness's conversations, whichever of them asks next."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.scripted.plays import Asked, Play, tool_call

Line = Play | Callable[[Asked], Play]
"""A play, or what makes one of the request."""


class Script:
    """A plan for the scripted engine.

    Args: lines: of each conversation by words that stand in its prompts, the first that fits. A conversation takes its next line
        with every request, a retry too.
    """

    def __init__(self, lines: Mapping[str, Sequence[Line]]) -> None:
        self.left = {words: list(given) for words, given in lines.items()}
        """What has not been said, by conversation."""
        self.unknown: list[Asked] = []
        """Requests of no conversation, or of one that was over."""

    def __call__(self, asked: Asked) -> Play:
        """The next play."""
        for words, left in self.left.items():
            if words in asked.prompt:
                if not left:
                    break
                line = left.pop(0)
                return line if isinstance(line, Play) else line(asked)
        self.unknown.append(asked)
        return Play("I know nothing of this.")


def calls(*named: tuple[str, dict[str, Any]]) -> Play:
    """One answer with these tool calls."""
    return Play("\n".join(tool_call(name, json.dumps(arguments)) for name, arguments in named))


def found(pattern: str, asked: Asked) -> str:
    """The last thing of a prompt that fits a pattern with one group."""
    return re.findall(pattern, asked.prompt)[-1]


CUT = Play("Let me see what", chunk_tokens=1, waits_after=2, dies_after=2)
"""The engine dies within an answer, once `let_go` lets it."""
BUSY = Play("come again", status=503)
"""The engine takes no request."""
