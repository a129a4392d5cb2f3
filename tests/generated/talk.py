"""A generated client and a generated chat template: what is echoed of an answer, and which ids that renders to.

Between them they do what clients and templates do to a sampled answer: leave out its thought, print its JSON again, encode its
text in another split, put in an empty thought, drop what is old, change the head.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.scripted.tongue import Messages, ToyTongue

TEMPLATES = ("plain", "thoughts stay", "thoughts go", "empty thought", "JSON printed again", "no newline")
ECHOES = ("as it is", "thought dropped", "JSON printed again", "text changed")
_TOYS = ("hi", "a", "b", "ab", "ok", "S", "1", "aab")
_TONGUE = ToyTongue()


def message_of(ids: Sequence[Any]) -> dict[str, Any]:
    """What the engine's parser makes of sampled ids."""
    text = _TONGUE.decode([i for i in ids if i in _TONGUE.vocabulary or i in range(20, 24)])
    head, tag, rest = text.partition("</think>")
    message: dict[str, Any] = {"role": "assistant", "content": rest if tag else text}
    if tag:
        message["reasoning_content"] = head.removeprefix("<think>")
    if _is_object(message["content"]):
        function = {"name": "f", "arguments": message["content"]}
        message |= {"content": None, "tool_calls": [{"id": "call-0", "type": "function", "function": function}]}
    return message


def render(template: str, messages: Messages) -> list[int]:
    """The ids of a conversation under a template."""
    last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    ids: list[int] = []
    for at, message in enumerate(messages):
        text = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            text += json.dumps(json.loads(arguments)) if template == "JSON printed again" else arguments
        thought = message.get("reasoning_content")
        if thought and (template == "thoughts stay" or (template == "thoughts go" and at > last_user)):
            text = f"<think>{thought}</think>{text}"
        newline = [] if template == "no newline" else [3]
        ids += [1, *_TONGUE.encode(message["role"]), 3, *_TONGUE.encode(text), 2, *newline]
    return [*ids, 1, 5, 3, *([7, 9, 8, 9] if template == "empty thought" else [])]


class Client:
    """Holds a conversation, and says what comes next."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.messages: list[dict[str, Any]] = self._opening()
        self._branches = [list(self.messages)]
        self._has_nonce = rng.random() < 0.1
        self.names: set[str] = set()

    def request(self) -> list[dict[str, Any]]:
        """The conversation as it is sent now."""
        if not self._has_nonce:
            return list(self.messages)
        self.names.add("head changes")
        return [{"role": "system", "content": self._rng.choice(("E1", "E2"))}, *self.messages]

    def hear(self, message: dict[str, Any]) -> None:
        """Take an answer into the conversation, the way this client does it, and say something to it."""
        style = self._rng.choice(ECHOES)
        self.names.add(style)
        echo = {key: value for key, value in message.items() if value is not None}
        if style == "thought dropped":
            echo.pop("reasoning_content", None)
        if style == "JSON printed again" and "tool_calls" in echo:
            call = echo["tool_calls"][0]
            function = {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))}
            echo["tool_calls"] = [{**call, "function": function}]
        if style == "text changed" and echo.get("content"):
            echo["content"] = "ok"
        # Half a character is shown as U+FFFD, which the toy vocabulary cannot write.
        for key in ("content", "reasoning_content"):
            if "\ufffd" in (echo.get(key) or ""):
                echo[key] = echo[key].replace("\ufffd", "S")
        role = "tool" if "tool_calls" in echo or self._rng.random() < 0.3 else "user"
        self.messages = [*self.messages, echo, {"role": role, "content": self._rng.choice(_TOYS)}]
        self._branches.append(list(self.messages))

    def turn(self) -> None:
        """Sometimes go back to an earlier conversation, start one for a sub-agent, or drop what is old."""
        if (draw := self._rng.random()) < 0.08:
            self.names.add("goes back")
            self.messages = list(self._rng.choice(self._branches))
        elif draw < 0.14:
            self.names.add("sub-agent")
            self.messages = self._opening()
        elif draw < 0.2 and len(self.messages) > 3:
            self.names.add("compacted")
            self.messages = [self.messages[0], *self.messages[-2:]]

    def _opening(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self._rng.choice(_TOYS)}]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
