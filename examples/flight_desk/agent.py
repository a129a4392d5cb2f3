"""The agent: an ordinary tool loop with the official `openai` client. It knows nothing of rollstream.

Whoever has a base URL and a key can run it against any Chat Completions server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI


def play(client: OpenAI, model: str, desk: Any, tools: list[Any], observe: Callable[[str, str], None]) -> None:
    """Play one desk to its end.

    Args:
        desk: has `task`, `is_done`, `call(name, arguments) -> str` and `give_up()`.
        observe: told each tool's name and result, as a harness would log it.
    """
    messages: list[Any] = [{"role": "user", "content": desk.task}]
    while not desk.is_done:
        response = client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            desk.give_up()
            return
        for call in message.tool_calls:
            if call.type != "function":
                continue
            result = desk.call(call.function.name, _arguments(call.function.arguments))
            observe(call.function.name, result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _arguments(text: str) -> dict[str, Any]:
    """The call's arguments; whatever is no JSON object becomes one that every tool refuses."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError:
        return {"unreadable": text}
    return arguments if isinstance(arguments, dict) else {"unreadable": text}
