"""Who may do what: a rollout's key opens the routes of one attempt, the admin key those that open rollouts and change weights.

Keys are never stored or logged: a rollout's key proves itself by its signature, the admin key is compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.producers.capability import Claims, KeyRefused, verify_key
from rollstream.producers.dialects.base import Problem, RequestRefused

ROLLOUT_KEY_HEADERS = (b"authorization", b"x-api-key")
"""Where the gateway's own routes of a rollout look for its key."""


class Keys:
    """Checks keys. Args: secret: what rollout keys are signed with. admin_key: None opens the admin routes to everybody."""

    def __init__(self, secret: bytes, admin_key: str | None, now_ms: Callable[[], int]) -> None:
        self._secret = secret
        self._admin_key = admin_key
        self._now_ms = now_ms

    def claims(
        self, headers: Mapping[bytes, bytes], path: Mapping[str, Any], names: Sequence[bytes] = ROLLOUT_KEY_HEADERS
    ) -> Claims:
        """What the key of a request says, if it opens the attempt that the path names.

        Args: names: headers to look into.

        Raises: RequestRefused: 401.
        """
        try:
            return verify_key(
                key_in(headers, names),
                self._secret,
                rollout_id=path["rollout_id"],
                attempt=path["attempt"],
                now_ms=self._now_ms(),
            )
        except KeyRefused as error:
            raise RequestRefused(str(error), problem=Problem.UNAUTHENTICATED, code="invalid_api_key") from error

    def check_admin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises: RequestRefused: 401."""
        given = key_in(headers, ROLLOUT_KEY_HEADERS)
        if self._admin_key is not None and not hmac.compare_digest(given.encode(), self._admin_key.encode()):
            raise RequestRefused(
                "this needs the admin key: `Authorization: Bearer <gateway.admin_key>`",
                problem=Problem.UNAUTHENTICATED,
                code="invalid_api_key",
            )


def key_in(headers: Mapping[bytes, bytes], names: Sequence[bytes]) -> str:
    """The first key in the headers of these names; empty if there is none."""
    for name in names:
        value = headers.get(name, b"").decode("latin-1").strip()
        if name == b"authorization":
            scheme, _, value = value.partition(" ")
            value = value.strip() if scheme.lower() == "bearer" else ""
        if value:
            return value
    return ""
