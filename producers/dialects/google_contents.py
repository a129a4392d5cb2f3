"""Google's contents, system instruction and tools as a conversation. Pure.

Text parts of one content are joined as they are, and so are its thoughts; a model's content is one assistant message, whatever
the order of text and function calls in it. A function response is a tool message where it stands: its `output` or `error` where
that is all it has, otherwise the whole object. Ids stay as they are; where a client leaves them out, which Google allows, calls
get `call_0`, `call_1`, ... by their place, and a response that has none answers the first open call of its name.

Fields may be spelled in camelCase or in snake_case, as with Google. Signatures of thoughts are not looked at.

Source: google-genai 3.6 types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import RequestRefused
from rollstream.producers.dialects.body import typed
from rollstream.producers.dialects.openai_chat import not_served
from rollstream.producers.engines.base import Conversation

_ROLES = {"user": "user", "model": "assistant", "function": "user", "tool": "user", "system": "system"}
"""Role of a content → role of a message; `function` and `tool` are older names for who gives function responses."""
_SERVED = frozenset(("text", "functionCall", "functionResponse"))
_NOT_SERVED = frozenset(
    ("inlineData", "fileData", "executableCode", "codeExecutionResult", "toolCall", "toolResponse")
)
_ABOUT_A_PART = frozenset(("thought", "thoughtSignature", "partMetadata"))
"""Fields that say something about a part; one that holds nothing else is empty."""
_TYPES = frozenset(("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"))
_SCHEMAS_BY_NAME = frozenset(("properties", "defs", "$defs"))
_SCHEMAS = frozenset(("items", "prefixItems", "anyOf", "additionalProperties"))


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """An object's fields by their names in camelCase; where both spellings are there, camelCase counts."""
    found = {_camel(name): value for name, value in values.items() if "_" in name}
    return found | {name: value for name, value in values.items() if "_" not in name}


def inner(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of an object in a field; none where it is missing. Raises: RequestRefused: it is something else."""
    return fields(typed(values, name, dict) or {})


def conversation_of(values: Mapping[str, Any]) -> Conversation:
    """What a body asks to render. Args: values: its fields. Raises: RequestRefused."""
    contents = values.get("contents")
    if not isinstance(contents, list) or not contents:
        raise RequestRefused(f"contents={contents!r}: expected a list with at least one content", param="contents")
    messages = _Messages()
    messages.add_system(values.get("systemInstruction"))
    for index, content in enumerate(contents):
        messages.add(content, f"contents[{index}]")
    choice, _ = tool_choice(values)
    tools, _ = tools_of(values)
    return Conversation(
        messages=messages.read,
        tools=tools or None,
        tool_choice=choice,
        template_kwargs=typed(values, "chatTemplateKwargs", dict) or {},
    )


def tools_of(values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The functions, and the names of tools that only Google can run. Raises: RequestRefused."""
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for index, tool in enumerate(typed(values, "tools", list) or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise RequestRefused(f"{where} is no object", param=where)
        found = fields(tool)
        for at, declared in enumerate(typed(found, "functionDeclarations", list) or ()):
            tools.append(_function(declared, f"{where}.functionDeclarations[{at}]"))
        left_out += [name for name, value in found.items() if name != "functionDeclarations" and value is not None]
    return tools, left_out


def tool_choice(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """OpenAI's `tool_choice`, and the names of allowed functions where they are several, which it cannot say."""
    config = inner(inner(values, "toolConfig"), "functionCallingConfig")
    mode = (typed(config, "mode", str) or "").upper()
    allowed = typed(config, "allowedFunctionNames", list) or []
    if mode == "NONE":
        return "none", []
    if mode != "ANY":
        return None, allowed
    if len(allowed) == 1:
        return {"type": "function", "function": {"name": str(allowed[0])}}, []
    return "required", allowed


class _Messages:
    """The messages read so far."""

    def __init__(self) -> None:
        self.read: list[dict[str, Any]] = []
        """In order."""
        self._calls = 0
        self._open: list[tuple[str, str]] = []
        """Id and name of calls that no response has answered."""

    def add_system(self, instruction: Any) -> None:
        """A content, or a text, as the first message; nothing where there is none."""
        if instruction is None:
            return
        where = "systemInstruction"
        parts = (
            [{"text": instruction}] if isinstance(instruction, str) else _parts(_content(instruction, where), where)
        )
        if any("text" not in part for part in parts):
            raise RequestRefused("systemInstruction has a part that is no text; send text", param=where)
        if parts:
            self.read.append({"role": "system", "content": "".join(part["text"] for part in parts)})

    def add(self, content: Any, where: str) -> None:
        """One content."""
        found = _content(content, where)
        role = found.get("role")
        role = "user" if role is None or role == "" else role
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestRefused(f"{where}.role={role!r}: expected 'user' or 'model'", param=f"{where}.role")
        parts = _parts(found, where)
        if role == "model":
            self._add_answer(parts, where)
        else:
            self._add_turn(_ROLES[role], parts, where)

    def _add_answer(self, parts: list[dict[str, Any]], where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            if "functionCall" in part:
                calls.append(self._call(part["functionCall"], where))
            elif "text" in part:
                (thoughts if part.get("thought") is True else texts).append(part["text"])
            else:
                raise RequestRefused(
                    f"{where} is the model's, and has a functionResponse; send it as the user's", param=where
                )
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.read.append(message)

    def _add_turn(self, role: str, parts: list[dict[str, Any]], where: str) -> None:
        texts: list[str] = []
        before = len(self.read)

        def flush() -> None:
            if texts:
                self.read.append({"role": role, "content": "".join(texts)})
                texts.clear()

        for part in parts:
            if "functionResponse" in part:
                flush()
                self.read.append(self._result(part["functionResponse"], where))
            elif "text" in part:
                texts.append(part["text"])
            else:
                raise RequestRefused(
                    f"{where} has a functionCall, which only a 'model' content may have", param=where
                )
        flush()
        if len(self.read) == before:
            self.read.append({"role": role, "content": ""})

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        found = _named(call, f"{where}.functionCall")
        arguments = orjson.dumps(typed(found, "args", dict) or {}).decode()
        call_id = typed(found, "id", str) or f"call_{self._calls}"
        self._calls += 1
        self._open.append((call_id, found["name"]))
        return {"id": call_id, "type": "function", "function": {"name": found["name"], "arguments": arguments}}

    def _result(self, response: Any, where: str) -> dict[str, Any]:
        found = _named(response, f"{where}.functionResponse")
        if found.get("parts"):
            raise not_served("functionResponse.parts", where)
        message = {"role": "tool", "name": found["name"], "content": _output(typed(found, "response", dict) or {})}
        call_id = self._answered(typed(found, "id", str), found["name"])
        return message if call_id is None else {**message, "tool_call_id": call_id}

    def _answered(self, call_id: str | None, name: str) -> str | None:
        """The id of the call that a response answers; None if nothing is open."""
        place = next(
            (at for at, call in enumerate(self._open) if (call[0] == call_id if call_id else call[1] == name)), None
        )
        if place is None:
            return call_id or None
        return self._open.pop(place)[0]


def _content(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise RequestRefused(f"{where} is {type(content).__name__}, expected an object with parts", param=where)
    return fields(content)


def _parts(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A content's parts that hold something, each with one of `_SERVED`."""
    read = []
    parts = content.get("parts")
    if parts is not None and not isinstance(parts, list):
        raise RequestRefused(f"{where}.parts is {type(parts).__name__}, expected a list", param=f"{where}.parts")
    for index, part in enumerate(parts or ()):
        at = f"{where}.parts[{index}]"
        if not isinstance(part, dict):
            raise RequestRefused(f"{at} is {type(part).__name__}, expected an object", param=at)
        found = {name: value for name, value in fields(part).items() if value is not None}
        known = _SERVED & found.keys()
        strange = [name for name in found if name in _NOT_SERVED or not (known or name in _ABOUT_A_PART)]
        if strange:
            raise not_served(_kind(found[strange[0]], strange[0]), at)
        if len(known) > 1:
            raise RequestRefused(f"{at} has {' and '.join(sorted(known))}, expected one of them", param=at)
        if known:
            typed(found, "text", str)
            read.append(found)
    return read


def _kind(value: Any, name: str) -> str:
    """What a part is, for people: its media type if it says one."""
    kind = fields(value).get("mimeType") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else name


def _named(values: Any, where: str) -> dict[str, Any]:
    found = fields(values) if isinstance(values, dict) else {}
    if not isinstance(found.get("name"), str) or not found["name"]:
        raise RequestRefused(f"{where} is no object with a name", param=where)
    return found


def _output(response: dict[str, Any]) -> str:
    """What the model is shown of a function response."""
    if response.keys() == {"output"}:
        return _text(response["output"])
    if response.keys() == {"error"}:
        text = _text(response["error"])
        return text if text.startswith("Error: ") else f"Error: {text}"
    return _text(response)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _function(declared: Any, where: str) -> dict[str, Any]:
    found = _named(declared, where)
    function = {"name": found["name"]}
    if found.get("description") is not None:
        function["description"] = typed(found, "description", str)
    schema = found.get("parametersJsonSchema")
    if schema is None:
        schema = _json_schema(found.get("parameters"))
    if schema is not None:
        if not isinstance(schema, dict):
            raise RequestRefused(
                f"{where} has parameters that are {type(schema).__name__}, expected a schema", param=where
            )
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _json_schema(schema: Any) -> Any:
    """A schema of Google's as JSON Schema, which is what templates and models know: types in lower case."""
    if isinstance(schema, list):
        return [_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for name, value in fields(schema).items():
        if name == "type" and isinstance(value, str) and value in _TYPES:
            read[name] = value.lower()
        elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            read[name] = {key: _json_schema(one) for key, one in value.items()}
        else:
            read[name] = _json_schema(value) if name in _SCHEMAS else value
    return read


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)
