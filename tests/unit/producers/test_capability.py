"""Rollout keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollstream.producers.capability import Claims, KeyRefused, mint_key, verify_key

CLAIMS = Claims("r-1", 0, "g-1", 4, "täsk", "default", 5, 1_000)


def test_key_gives_its_claims_back() -> None:
    """A key opens the rollout it was made for, and says all about it."""
    key = mint_key(CLAIMS, b"s")

    claims = verify_key(key, b"s", rollout_id="r-1", attempt=0, now_ms=999)

    assert CLAIMS == claims


@pytest.mark.parametrize(
    ("key", "rollout_id", "attempt", "now_ms", "reason"),
    [
        ("", "r-1", 0, 0, "missing"),
        ("sk-whatever", "r-1", 0, 0, "forged"),
        ("rs-\u00e9.\u00e9", "r-1", 0, 0, "forged"),
        (mint_key(CLAIMS, b"other"), "r-1", 0, 0, "forged"),
        (mint_key(CLAIMS, b"s").replace(".", "A."), "r-1", 0, 0, "forged"),
        (mint_key(CLAIMS, b"s"), "r-2", 0, 0, "other_rollout"),
        (mint_key(CLAIMS, b"s"), "r-1", 1, 0, "other_rollout"),
        (mint_key(CLAIMS, b"s"), "r-1", 0, 1_000, "expired"),
    ],
)
def test_key_is_refused_with_its_reason(key: str, rollout_id: str, attempt: int, now_ms: int, reason: str) -> None:
    """A key that is missing, forged, another rollout's or expired is refused, and says why."""
    with pytest.raises(KeyRefused) as refused:
        verify_key(key, b"s", rollout_id=rollout_id, attempt=attempt, now_ms=now_ms)

    assert reason == refused.value.reason


def test_claims_cannot_be_exchanged() -> None:
    """The claims of one key under the signature of another are refused."""
    first, second = mint_key(CLAIMS, b"s"), mint_key(replace(CLAIMS, rollout_id="r-2"), b"s")
    mixed = f"{second.partition('.')[0]}.{first.partition('.')[2]}"

    with pytest.raises(KeyRefused):
        verify_key(mixed, b"s", rollout_id="r-2", attempt=0, now_ms=0)
