"""What all routes of Anthropic's protocol share: where the key is, whose client asks, and the words of errors. Pure.

Claude Code stops at an error that starts with "prompt is too long", and reads both numbers from it; a gateway that cannot serve
now is overloaded, 529. Source: anthropic 2.14 types; gateway.md §3.3 of the design notes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import STATUS, Problem, RequestRefused

_TYPES = {
    Problem.UNAUTHENTICATED: "authentication_error",
    Problem.NOT_FOUND: "not_found_error",
    Problem.TOO_LARGE: "request_too_large",
    Problem.RATE_LIMITED: "rate_limit_error",
    Problem.INTERNAL: "api_error",
    Problem.ENGINE_FAILED: "api_error",
    Problem.UNAVAILABLE: "overloaded_error",
}
_STATUS = {**STATUS, Problem.UNAVAILABLE: 529}
_COUNTS = re.compile(
    r"maximum context length is (\d+) tokens?\b.*?\b(?:resulted in|requested) (\d+) tokens?\b", re.DOTALL
)
"""The limit and the prompt's tokens in an overflow as the gateway and vLLM word it."""


class AnthropicSurface:
    """As in `Surface`, all but the routes."""

    key_headers = (b"x-api-key", b"authorization")

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`: the official clients name the protocol's version on every path."""
        return b"anthropic-version" in headers or path == "/v1/messages" or path.startswith("/v1/messages/")

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return _STATUS[refusal.problem], orjson.dumps(error_body(refusal))


def error_body(refusal: RequestRefused) -> dict[str, Any]:
    """The body of an error answer, and the data of an error event.

    `request_id` is null: what is refused has no id of its own; that of a call is in the header `request-id`.
    """
    error: dict[str, Any] = {
        "type": _TYPES.get(refusal.problem, "invalid_request_error"),
        "message": _overflow(str(refusal)) if refusal.problem is Problem.OVERFLOW else str(refusal),
    }
    if refusal.code is not None:
        error["details"] = {"error_code": refusal.code}
    return {"type": "error", "error": error, "request_id": None}


def _overflow(message: str) -> str:
    found = _COUNTS.search(message)
    if found is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {found[2]} tokens > {found[1]} maximum"
