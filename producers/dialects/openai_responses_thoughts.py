"""Thoughts in the Responses protocol, so that a client which sends them back brings them back whole. Pure.

Codex sends a reasoning item back without its text and with its `encrypted_content`, and this gateway keeps no state. So where
a client asks for `encrypted_content`, that is the thought itself, packed, and the next prompt can hold it, as models' templates
want it between the tool calls of a turn. It hides nothing; the same text stands beside it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

_PREFIX = "rollstream.thought.1."
"""Tells our packing from what another server has encrypted."""


def pack_thought(text: str) -> str:
    """`encrypted_content` for a thought."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def thought_of(item: Mapping[str, Any]) -> str:
    """The thought of a reasoning item that a client sends back: its text, else what is packed, else its summary.

    Texts of one item are joined as they are, parts of a summary by a blank line. Empty where there is none, or another server has
    encrypted it.
    """
    return (
        "".join(_texts(item.get("content")))
        or _unpacked(item.get("encrypted_content"))
        or "\n\n".join(_texts(item.get("summary")))
    )


def _unpacked(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return ""


def _texts(parts: Any) -> list[str]:
    found = parts if isinstance(parts, list) else ()
    return [part["text"] for part in found if isinstance(part, dict) and isinstance(part.get("text"), str)]
