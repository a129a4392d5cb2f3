"""Rollout keys: who holds one may write into one attempt of one rollout, until it expires.

A key carries its claims, signed, so any replica of the gateway can check it without asking anybody. Nothing a client sends beside
it (model name, headers, body) is trusted for identity.

Form: `rs-<claims>.<signature>`, both base64url; the claims are a JSON list, the signature HMAC-SHA256 over them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import astuple, dataclass

from rollstream.errors import RollstreamError

_PREFIX = "rs-"


class KeyRefused(RollstreamError):
    """A rollout key is missing, forged, expired or another rollout's. Control flow: the client gets a 401."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a key says about its rollout; everything a record needs to know of it."""

    rollout_id: str
    """The rollout."""
    attempt: int
    """Its attempt."""
    group_id: str
    """Its group."""
    group_size: int
    """How many rollouts the group shall have."""
    task_id: str
    """Name of the task."""
    policy: str
    """Name of the policy that plays."""
    opened_at_ms: int
    """When the rollout was opened, UTC epoch milliseconds; calls are counted from it."""
    expires_at_ms: int
    """When the key stops working, UTC epoch milliseconds."""


def mint_key(claims: Claims, secret: bytes) -> str:
    """Sign claims into a key."""
    body = _encode(json.dumps(astuple(claims), separators=(",", ":")).encode())
    return f"{_PREFIX}{body}.{_encode(_sign(body, secret))}"


def verify_key(key: str, secret: bytes, *, rollout_id: str, attempt: int, now_ms: int) -> Claims:
    """The claims of a key that opens this attempt of this rollout now.

    Raises: KeyRefused: reason `missing`, `forged`, `expired` or `other_rollout`.
    """
    if not key:
        raise KeyRefused("no rollout key: expected `Authorization: Bearer rs-...` as opened", reason="missing")
    body, _, signature = key.removeprefix(_PREFIX).partition(".")
    try:
        is_genuine = hmac.compare_digest(_decode(signature), _sign(body, secret))
    except (binascii.Error, ValueError):
        is_genuine = False
    if not is_genuine:
        raise KeyRefused(
            "this rollout key was not signed here; open the rollout again, or give every gateway replica the same "
            "gateway.key_secret",
            reason="forged",
        )
    claims = Claims(*json.loads(_decode(body)))
    if (claims.rollout_id, claims.attempt) != (rollout_id, attempt):
        raise KeyRefused(
            f"this rollout key belongs to rollout_id={claims.rollout_id!r} attempt={claims.attempt}, not to "
            f"rollout_id={rollout_id!r} attempt={attempt}",
            reason="other_rollout",
        )
    if now_ms >= claims.expires_at_ms:
        raise KeyRefused(
            "this rollout key has expired; raise gateway.key_ttl_s or open a new attempt", reason="expired"
        )
    return claims


def _sign(body: str, secret: bytes) -> bytes:
    return hmac.digest(secret, body.encode("ascii", "replace"), hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
