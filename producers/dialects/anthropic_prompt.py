"""What a request of Anthropic's protocol shows the model: system prompt, messages and tools, as chat messages. Pure.

Order is kept: the system prompt stands first, a system message within the list stays where it is, and each tool result is a
message of its own between what stands before and behind it. Text blocks that come to stand in one message are put together with a
line break between them: those of the system prompt, of a message, of a tool result, and several thoughts of one answer.
A tool result that is an error starts with "Error: ". Tools with deferred loading are shown from the start.

Claude Code's billing line, which changes with every call, is no part of the prompt.

Source: anthropic 2.14 types; gateway.md §1.6, §2.1 of the design notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import RequestRefused
from rollstream.producers.dialects.body import typed
from rollstream.producers.dialects.openai_chat import not_served
from rollstream.producers.engines.base import Conversation

Block = Mapping[str, Any]
Message = dict[str, Any]

_BILLING = "x-anthropic-billing-header"
_BETWEEN = "\n"
_RUN_BY_CLIENTS = ("bash_", "text_editor_", "memory_", "computer_", "browser_")
"""Types of tools that the client runs and whose arguments no request describes."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def without_billing(values: Mapping[str, Any]) -> dict[str, Any]:
    """A body without the billing line in front of its system prompt or of a block of it."""
    system = values.get("system")
    if isinstance(system, str):
        return {**values, "system": _unbilled(system)}
    if not isinstance(system, list):
        return dict(values)
    kept = []
    for block in system:
        text = block.get("text") if isinstance(block, dict) else None
        if isinstance(text, str) and text.startswith(_BILLING):
            block = {**block, "text": _unbilled(text)}
            if not block["text"]:
                continue
        kept.append(block)
    return {**values, "system": kept}


def read_conversation(values: Mapping[str, Any]) -> Conversation:
    """What is rendered. Args: values: a body `without_billing`. Raises: RequestRefused."""
    tools = _tools(values)
    thinking = typed(values, "thinking", dict) or {}
    kwargs = typed(values, "chat_template_kwargs", dict) or {}
    if thinking.get("type") == "disabled":
        kwargs = {"enable_thinking": False, **kwargs}
    return Conversation(
        messages=[*_system(values), *_messages(values)],
        tools=tools or None,
        tool_choice=_tool_choice(values, tools),
        template_kwargs=kwargs,
    )


def server_tools(values: Mapping[str, Any]) -> list[str]:
    """Types of the tools that a server would run; nobody here does, and the model is not shown them."""
    return [str(tool["type"]) for tool in values.get("tools") or () if _is_built_in(tool)]


def _unbilled(system: str) -> str:
    return system.partition("\n")[2].lstrip("\n") if system.startswith(_BILLING) else system


def _system(values: Mapping[str, Any]) -> Iterator[Message]:
    system = values.get("system")
    if system:
        yield {"role": "system", "content": _joined(_blocks(system, "system"))}


def _messages(values: Mapping[str, Any]) -> Iterator[Message]:
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else type(messages).__name__
        raise RequestRefused(f"messages is {found}, expected a list with at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        read = _ROLES.get(role) if isinstance(role, str) else None
        if read is None:
            raise RequestRefused(f"{where} has role={role!r}, expected user, assistant or system", param=where)
        yield from read(_blocks(message.get("content"), f"{where}.content"))


def _user(blocks: list[tuple[str, Block]]) -> Iterator[Message]:
    texts: list[tuple[str, Block]] = []
    for where, block in blocks:
        if block.get("type") != "tool_result":
            texts.append((where, block))
            continue
        if texts:
            yield {"role": "user", "content": _joined(texts)}
            texts = []
        yield _tool_result(where, block)
    if texts or not blocks:
        yield {"role": "user", "content": _joined(texts)}


def _assistant(blocks: list[tuple[str, Block]]) -> Iterator[Message]:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        if block.get("type") == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif block.get("type") == "tool_use":
            calls.append(_tool_use(where, block))
        else:
            texts.append(_text(where, block))
    message: Message = {"role": "assistant", "content": _BETWEEN.join(texts)}
    if any(thoughts):
        message["reasoning_content"] = _BETWEEN.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _system_within(blocks: list[tuple[str, Block]]) -> Iterator[Message]:
    yield {"role": "system", "content": _joined(blocks)}


_ROLES: dict[str, Callable[[list[tuple[str, Block]]], Iterator[Message]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system_within,
}


def _tool_use(where: str, block: Block) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestRefused(f"{where}.input is {type(arguments).__name__}, expected an object", param=where)
    function = {"name": _string(block, "name", where), "arguments": orjson.dumps(arguments).decode()}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _tool_result(where: str, block: Block) -> Message:
    given = block.get("content")
    content = "" if given is None else _joined(_blocks(given, f"{where}.content"))
    if block.get("is_error") and not content.startswith("Error: "):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": content}


def _blocks(content: Any, where: str) -> list[tuple[str, Block]]:
    """Blocks with the places where they stand; a text is one block."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestRefused(f"{where} is {type(content).__name__}, expected text or a list of blocks", param=where)
    found: list[tuple[str, Block]] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, dict):
            raise RequestRefused(f"{at} is {type(block).__name__}, expected a block", param=at)
        found.append((at, block))
    return found


def _joined(blocks: list[tuple[str, Block]]) -> str:
    return _BETWEEN.join(_text(where, block) for where, block in blocks)


def _text(where: str, block: Block) -> str:
    """What a block says in text. Raises: RequestRefused: it says something else."""
    kind = block.get("type", "text")
    if kind == "text":
        return _string(block, "text", where)
    if kind == "document":
        return _document(where, block)
    if kind == "search_result":
        texts = [_string(block, "title", where), _string(block, "source", where)]
        return _BETWEEN.join([*texts, _joined(_blocks(block.get("content"), f"{where}.content"))])
    if kind == "tool_reference":
        return _string(block, "tool_name", where)
    raise not_served(kind, where)


def _document(where: str, block: Block) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise not_served("document", where)
    if kind == "text":
        text = _string(source, "data", f"{where}.source")
    else:
        text = _joined(_blocks(source.get("content"), f"{where}.source.content"))
    heads = [_string(block, name, where) for name in ("title", "context") if block.get(name)]
    return _BETWEEN.join([*heads, text])


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestRefused(f"{where}.{name} is {type(value).__name__}, expected text", param=where)
    return value


def _is_built_in(tool: Block) -> bool:
    """Whether a tool is known by its type alone, and not described."""
    return tool.get("type") not in (None, "custom") and tool.get("input_schema") is None


def _tools(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for index, tool in enumerate(typed(values, "tools", list) or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise RequestRefused(f"{where} is {type(tool).__name__}, expected an object", param=where)
        if _is_built_in(tool):
            if str(tool["type"]).startswith(_RUN_BY_CLIENTS):
                raise RequestRefused(
                    f"{where} has type={tool['type']!r} and no input_schema, so the model would not know its arguments; "
                    "send it as a custom tool with an input_schema",
                    param=where,
                )
            continue
        schema = tool.get("input_schema")
        if schema is not None and not isinstance(schema, dict):
            raise RequestRefused(f"{where}.input_schema is {type(schema).__name__}, expected an object", param=where)
        function: dict[str, Any] = {"name": _string(tool, "name", where)}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", where)
        function["parameters"] = schema or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(values: Mapping[str, Any], tools: list[dict[str, Any]]) -> Any:
    choice = typed(values, "tool_choice", dict)
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        name = choice.get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise RequestRefused(f"tool_choice.name={name!r}: expected the name of a tool", param="tool_choice")
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestRefused(f"tool_choice.type={kind!r}: expected auto, any, none or tool", param="tool_choice")
    return _CHOICES[kind] if tools else None
