"""The versions of a policy's weights, as the trainer publishes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version of a policy's weights that engines may serve."""

    policy: str
    """Name of the policy."""
    version: int
    """Counts up from 0."""
    weights_ref: str
    """Where the weights are: a folder or an object store address."""
    published_at_ms: int
    """UTC epoch milliseconds."""
    weights_digest: str = ""
    """Digest of the weights, if known."""
    parent_version: int | None = None
    """The version it was trained from."""
    step: int | None = None
    """The optimizer step that made it."""
    adapter: str = ""
    """Name that the engine serves these weights under, for a LoRA adapter; empty for full weights. Never used twice."""
    base_version: int | None = None
    """Version of the full weights below an adapter, if known."""
    pause_mode: str = ""
    """How running calls were treated while the weights were changed: `abort`, `wait` or `keep`; empty if not known."""
