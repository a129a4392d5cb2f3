"""The error objects of OpenAI's protocols. Pure.

Codex and Pi know an overflow by the code `context_length_exceeded`. Source: gateway.md §3.3 of the design notes.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollstream.producers.dialects.base import STATUS, Problem, RequestRefused

_TYPES = {
    Problem.UNAUTHENTICATED: "authentication_error",
    Problem.RATE_LIMITED: "rate_limit_error",
    Problem.INTERNAL: "server_error",
    Problem.ENGINE_FAILED: "server_error",
    Problem.UNAVAILABLE: "server_error",
}


def error_object(refusal: RequestRefused) -> dict[str, Any]:
    """The `error` of an answer or of an event."""
    return {
        "message": str(refusal),
        "type": _TYPES.get(refusal.problem, "invalid_request_error"),
        "param": refusal.param,
        "code": refusal.code,
    }


def error_answer(refusal: RequestRefused) -> tuple[int, bytes]:
    """HTTP status and body."""
    return STATUS[refusal.problem], orjson.dumps({"error": error_object(refusal)})
