"""Reading request bodies, for every protocol: JSON, fields of the right type, a digest. Pure.

Each function raises RequestRefused (400) that names the field and what was expected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import RequestRefused
from rollstream.schemas.identity import digest_bytes

_NEVER_IN_DIGEST = frozenset(("cache_control",))
"""Fields, however deep, that say how an answer is cached and not what is asked."""
_DEEPEST = 200
"""Levels of nesting in a body; orjson writes 254 at most, and no client needs them."""


def read_object(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object."""
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise RequestRefused(f"the body is no JSON: {cause}", code="invalid_json") from cause
    if not isinstance(values, dict):
        raise RequestRefused(f"the body is {type(values).__name__}, expected an object", code="invalid_json")
    if _depth(values) > _DEEPEST:
        raise RequestRefused(f"the body is nested more than {_DEEPEST} levels deep", code="invalid_json")
    return values


def digest_request(protocol: str, values: Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    """What two requests share that ask for the same.

    Args: without: top-level fields that do not change the answer, such as `stream`. `cache_control` is left out at any depth.
    """
    kept = {name: _plain(value) for name, value in values.items() if name not in without}
    return digest_bytes(protocol.encode(), orjson.dumps(kept, option=orjson.OPT_SORT_KEYS))


def typed(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of this type, or None."""
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestRefused(f"{name} is {type(value).__name__}, expected {kind.__name__}", param=name)
    return value


def number(values: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number within [low, high], or None."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestRefused(f"{name}={value!r}: expected a number from {low:g} to {high:g}", param=name)
    return float(value)


def whole(values: Mapping[str, Any], name: str, low: int, high: int = 2**63 - 1) -> int | None:
    """An integer within [low, high], or None."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestRefused(f"{name}={value!r}: expected an integer of at least {low}", param=name)
    if value > high:
        raise RequestRefused(f"{name}={value!r}: expected an integer of at most {high}", param=name)
    return value


def stops(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A stop string or a list of them; empty where there is none."""
    stop = values.get(name)
    found = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise RequestRefused(f"{name}={stop!r}: expected a text or a list of texts", param=name)
    return tuple(found)


def overruled(values: Mapping[str, Any], unused: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that the server decides. Args: unused: name → the value that is as good as none, such as `{"top_p": 1}`."""
    return {
        name: values[name]
        for name, neutral in unused.items()
        if values.get(name) is not None and values[name] != neutral
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if name not in _NEVER_IN_DIGEST}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _depth(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        at, level = todo.pop()
        deepest = max(deepest, level)
        if level <= _DEEPEST:
            inner = at.values() if isinstance(at, dict) else at if isinstance(at, list) else ()
            todo += [(one, level + 1) for one in inner]
    return deepest
