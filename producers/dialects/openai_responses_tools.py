"""Tools of the Responses protocol as functions, which is what a chat template knows, and calls of them back. Pure.

    function    stays one
    custom      a function with one text, `input`; its grammar is told in the description and nothing enforces it
    namespace   each of its tools is one, `<namespace>__<name>`; what it says of itself stands before the first one's description
    others      hosted ones, such as web_search, which nobody here can run: left out, and named in `Tools.left_out`

Source: openai 3.57 types; requests of Codex 0.171; gateway.md §1.6 of the design notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.dialects.base import RequestRefused


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool as the client named it."""

    name: str
    """Within its namespace."""
    namespace: str | None = None
    """Its namespace; None for none."""
    is_custom: bool = False
    """Its input is a text and no JSON."""


@dataclass(frozen=True, slots=True)
class Tools:
    """A request's tools."""

    functions: list[dict[str, Any]]
    """In chat's form, in order."""
    origins: Mapping[str, Origin]
    """Function's name → the tool that it stands for."""
    left_out: tuple[str, ...]
    """Types of the tools that are not among the functions."""

    def origin(self, function: str) -> Origin:
        """The tool that a call is for; a name that the model made up is taken for a function's."""
        return self.origins.get(function) or Origin(function)


def flat_name(name: str, namespace: str | None) -> str:
    """The function's name."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Arguments of the function that stands for a custom tool."""
    return orjson.dumps({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """The text that a custom tool gets; arguments that are not as asked for are the text."""
    try:
        values = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = values.get("input") if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def read_tools(values: list[Any]) -> Tools:
    """The tools of a request. Raises: RequestRefused: one is no tool, or two would have one name."""
    functions: list[dict[str, Any]] = []
    origins: dict[str, Origin] = {}
    left_out: list[str] = []
    for where, tool, namespace, heading in _each(values):
        if tool.get("type") not in ("function", "custom"):
            left_out.append(str(tool.get("type")))
            continue
        origin = Origin(_name(tool, where), namespace, tool["type"] == "custom")
        name = flat_name(origin.name, namespace)
        if origins.setdefault(name, origin) != origin:
            raise RequestRefused(f"{where}: another tool is called {name!r} already; rename one of them", param=where)
        function: dict[str, Any] = {"name": name}
        description = "\n\n".join(
            text for text in (heading, tool.get("description")) if isinstance(text, str) and text
        )
        if description:
            function["description"] = description
        function["parameters"] = _custom_parameters(tool) if origin.is_custom else _parameters(tool, where)
        functions.append({"type": "function", "function": function})
    return Tools(functions, origins, tuple(left_out))


def read_choice(choice: Any, tools: Tools) -> tuple[Any, bool]:
    """`tool_choice` in chat's form, and whether that says all of it.

    Raises: RequestRefused: it is none, or names a tool that is not there.
    """
    if choice is None or choice in ("none", "auto", "required"):
        return choice, True
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str):
        raise RequestRefused(
            f"tool_choice={str(choice)[:80]!r}: expected none, auto, required or a tool", param="tool_choice"
        )
    if kind == "allowed_tools":
        return ("required" if choice.get("mode") == "required" else "auto"), False
    if kind not in ("function", "custom"):
        return "auto", False
    namespace = choice.get("namespace")
    name = flat_name(str(choice.get("name")), namespace if isinstance(namespace, str) else None)
    if name not in tools.origins:
        raise RequestRefused(f"tool_choice names {name!r}, and tools has none of that name", param="tool_choice")
    return {"type": "function", "function": {"name": name}}, True


def _each(values: list[Any]) -> Iterator[tuple[str, dict[str, Any], str | None, str | None]]:
    """Each tool with its place, its namespace, and what that says of itself where the tool is its first."""
    for index, tool in enumerate(values):
        where = f"tools[{index}]"
        _expect(tool, dict, where)
        if tool.get("type") != "namespace":
            yield where, tool, None, None
            continue
        namespace, heading = _name(tool, where), tool.get("description")
        _expect(tool.get("tools"), list, f"{where}.tools")
        for at, inner in enumerate(tool["tools"]):
            _expect(inner, dict, f"{where}.tools[{at}]")
            yield f"{where}.tools[{at}]", inner, namespace, heading if at == 0 else None


def _expect(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise RequestRefused(f"{where} is {type(value).__name__}, expected {kind.__name__}", param=where)


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestRefused(f"{where}.name={str(name)[:80]!r}: expected a name", param=f"{where}.name")
    return name


def _parameters(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = tool.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}}
    _expect(parameters, dict, f"{where}.parameters")
    return dict(parameters)


def _custom_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    form = tool.get("format")
    definition = form.get("definition") if isinstance(form, dict) else None
    if isinstance(definition, str):
        text["description"] = f"The whole input, by this {form.get('syntax')} grammar:\n{definition}"  # type: ignore[union-attr]
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}
