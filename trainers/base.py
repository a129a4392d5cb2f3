"""What a trainer reads: whole groups, from something that knows where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollstream.schemas.records import GroupBuilt, Sample


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A group with all its samples."""

    built: GroupBuilt
    """What build said about it."""
    samples: tuple[Sample, ...]
    """Its samples, in the order of `built.sample_ids`; at least one."""

    @property
    def group_id(self) -> str:
        """The group."""
        return self.built.group_id

    @property
    def version_min(self) -> int:
        """Oldest policy version that sampled one of its tokens."""
        return min(sample.version_min for sample in self.samples)

    def staleness(self, trainer_version: int) -> int:
        """Age of its oldest token, in policy versions."""
        return trainer_version - self.version_min


class SampleSource(Protocol):
    """Where a trainer gets groups from. The trainer owns the position: it belongs into the checkpoint."""

    def next_groups(self, n: int, timeout_s: float) -> list[SampleGroup]:
        """Up to `n` groups, fewer if no more came in time; each group once."""

    def position(self) -> Mapping[str, Any]:
        """Where reading goes on after the groups that were handed out so far, as JSON values."""

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from an earlier position."""

    def record_step(
        self,
        *,
        step: int,
        version_before: int,
        version_after: int,
        groups: Sequence[SampleGroup],
        checkpoint: str | None = None,
    ) -> str:
        """Write down which samples went into an optimizer step. Returns: id of that record."""
