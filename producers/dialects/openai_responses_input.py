"""The input of the Responses protocol as chat messages. Pure.

`instructions` is the first message, a system message. Items stay in their order; those of one answer, which chat has as one
message, become one: thought, text, calls. An answer ends at any other item, and where a thought or a text comes to an answer that
has text or calls already. Two thoughts of one answer are joined by a blank line, parts of a message or of a result as they are.

Arguments and ids stay the characters they are. A namespaced call is called by the flat name, a custom tool's input is the one
argument of its function; see `openai_responses_tools.py`.

Source: openai 3.57 types; requests of Codex 0.171; gateway.md §2.1 of the design notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import RequestRefused
from rollstream.producers.dialects.body import typed
from rollstream.producers.dialects.openai_chat import not_served
from rollstream.producers.dialects.openai_responses_thoughts import thought_of
from rollstream.producers.dialects.openai_responses_tools import custom_arguments, flat_name

_ROLES = ("system", "developer", "user", "assistant")


def read_input(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of a request, at least one. Raises: RequestRefused."""
    reader = _Reader()
    instructions = typed(values, "instructions", str)
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    given = values.get("input")
    if isinstance(given, str) and given:
        reader.messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        for index, item in enumerate(given):
            reader.read(item, f"input[{index}]")
    else:
        found = "empty" if given in ("", []) else type(given).__name__
        raise RequestRefused(f"input is {found}, expected a text or a list with at least one item", param="input")
    if not reader.messages:
        raise RequestRefused("input has nothing that the model could read, expected a message", param="input")
    return reader.messages


class _Reader:
    """Reads items in their order into `messages`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        """The assistant message that the next item may belong to."""
        self._readers: dict[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._result,
            "custom_tool_call_output": self._result,
        }

    def read(self, item: Any, where: str) -> None:
        """Read one item."""
        if not isinstance(item, dict):
            raise RequestRefused(f"{where} is {type(item).__name__}, expected an object", param=where)
        kind = item.get("type") or ("message" if "role" in item else None)
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise RequestRefused(
                f"{where}.type={str(kind)[:80]!r}: expected one of {', '.join(self._readers)}; no state is kept "
                "and no hosted tool is run here, so send what it stands for as one of these",
                param=where,
            )
        reader(item, where)

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, text = item.get("role"), _text(item.get("content"), f"{where}.content")
        if role not in _ROLES:
            raise RequestRefused(f"{where}.role={str(role)[:80]!r}: expected one of {', '.join(_ROLES)}", param=where)
        if role == "assistant":
            self._end_answer_that_has_spoken()
            self._in_answer()["content"] = text
        else:
            self._say({"role": role, "content": text})

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        self._end_answer_that_has_spoken()
        thought = thought_of(item)
        if thought:
            answer = self._in_answer()
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = f"{before}\n\n{thought}" if before else thought

    def _function_call(self, item: dict[str, Any], where: str) -> None:
        arguments = item.get("arguments")
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        self._call(item, where, _string(arguments, f"{where}.arguments"))

    def _custom_call(self, item: dict[str, Any], where: str) -> None:
        self._call(item, where, custom_arguments(_string(item.get("input"), f"{where}.input")))

    def _call(self, item: dict[str, Any], where: str, arguments: str) -> None:
        namespace = item.get("namespace")
        name = flat_name(
            _string(item.get("name"), f"{where}.name"),
            None if namespace is None else _string(namespace, f"{where}.namespace"),
        )
        self._in_answer().setdefault("tool_calls", []).append(
            {
                "id": _string(item.get("call_id"), f"{where}.call_id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )

    def _result(self, item: dict[str, Any], where: str) -> None:
        call_id = _string(item.get("call_id"), f"{where}.call_id")
        self._say({"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"), f"{where}.output")})

    def _say(self, message: dict[str, Any]) -> None:
        self._answer = None
        self.messages.append(message)

    def _end_answer_that_has_spoken(self) -> None:
        if self._answer is not None and (self._answer["content"] or "tool_calls" in self._answer):
            self._answer = None

    def _in_answer(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(f"{where} is {type(value).__name__}, expected text", param=where)
    return value


def _text(content: Any, where: str) -> str:
    if not isinstance(content, list):
        return _string(content, where)
    texts = []
    for part in content:
        values = part if isinstance(part, dict) else {"text": part}
        text = values.get("refusal") if values.get("type") == "refusal" else values.get("text")
        if not isinstance(text, str):
            raise not_served(values.get("type"), where)
        texts.append(text)
    return "".join(texts)
