"""What the routes of Google's protocol share: versions in the path, keys, and the shape of errors. Pure.

Source: google-genai 3.6 (`errors.py`), google.rpc.Status and its details; gateway.md §3.3 of the design notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import STATUS, Problem, RequestRefused

_VERSIONS = ("/v1beta", "/v1")
"""Of the interface; clients ask for the first unless they are told otherwise."""
_STATUSES = {
    Problem.UNAUTHENTICATED: "UNAUTHENTICATED",
    Problem.NOT_FOUND: "NOT_FOUND",
    Problem.RATE_LIMITED: "RESOURCE_EXHAUSTED",
    Problem.INTERNAL: "INTERNAL",
    Problem.ENGINE_FAILED: "INTERNAL",
    Problem.UNAVAILABLE: "UNAVAILABLE",
}
_OVERFLOW = "The input token count exceeds the maximum number of tokens allowed. "
"""What agents look for in the text, since the protocol has no code for it (Pi: `input token count.*exceeds the maximum`)."""
_DETAIL = "type.googleapis.com/google.rpc."


class GoogleSurface:
    """What is the same for calls, counts and models."""

    key_headers = (b"x-goog-api-key", b"authorization")

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`: the key's header is Google's alone, and so is this version of a path."""
        return b"x-goog-api-key" in headers or path.startswith("/v1beta/")

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return STATUS[refusal.problem], orjson.dumps(error_body(refusal))


def versioned(path: str) -> tuple[str, ...]:
    """A path below each version of the interface."""
    return tuple(f"{version}{path}" for version in _VERSIONS)


def error_body(refusal: RequestRefused) -> dict[str, Any]:
    """An error, as an answer or in a stream. `error` is the only field: the Python client looks at how an event begins."""
    message = f"{_OVERFLOW}{refusal}" if refusal.problem is Problem.OVERFLOW else str(refusal)
    error: dict[str, Any] = {
        "code": STATUS[refusal.problem],
        "message": message,
        "status": _STATUSES.get(refusal.problem, "INVALID_ARGUMENT"),
    }
    details = _details(refusal)
    if details:
        error["details"] = details
    return {"error": error}


def _details(refusal: RequestRefused) -> list[dict[str, Any]]:
    details: list[dict[str, Any]] = []
    if refusal.code is not None:
        details.append({"@type": f"{_DETAIL}ErrorInfo", "reason": refusal.code, "domain": "rollstream"})
    if refusal.param is not None:
        violation = {"field": refusal.param, "description": str(refusal)}
        details.append({"@type": f"{_DETAIL}BadRequest", "fieldViolations": [violation]})
    if refusal.retry_after_s is not None:
        details.append({"@type": f"{_DETAIL}RetryInfo", "retryDelay": f"{refusal.retry_after_s}s"})
    return details
