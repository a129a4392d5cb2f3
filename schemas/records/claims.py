"""What stands in a topic in place of a record that is too large for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """Names the claim that holds a record's bytes. May stand in any topic; `Codec.decode` gives the record instead."""

    record: str
    """Name of the record, for instance `rollout`."""
    digest: str
    """blake2b-128 of the claim's bytes: the framed record. It makes the claim's name, see `claim_name`."""
    size_bytes: int
    """Length of the claim's bytes."""
    rollout_id: str | None = None
    """The record's rollout, if it has one: for dead letters of a claim that is gone."""
    call_id: str | None = None
    """The record's call, if it has one."""
