"""What the gateway remembers of open rollouts: bases for prompt deltas, the order of calls, retries. An optimisation only.

A gateway that lost it (restart, another replica, too many rollouts) writes whole prompts and takes a retry for a new call;
nothing becomes wrong. Two rules make that so:

* `call_index` is the milliseconds since the rollout was opened, or one more than the last index if that is larger. The opening
  time is in the rollout's key, so indexes rise across restarts and replicas as far as their clocks agree.
* Only an answer that the client got whole is a base: nothing a client can echo is missed, and no other answer can carry the
  same call id with other ids.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from rollstream.producers.engines.base import Ids
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import PromptDelta, Terminal

_MAX_ROLLOUTS = 10_000
_MAX_IDS = 50_000_000
"""Ids of all rollouts together: 200 MB."""
_MAX_BASES = 8
"""Bases of one rollout: its last calls, and with them the last call of each of a few sub-agents."""


@dataclass(slots=True)
class RolloutMemory:
    """What is remembered of one rollout attempt."""

    last_index: int = -1
    bases: dict[str, Ids] = field(default_factory=dict)
    """Call id → (prompt ‖ output), oldest first."""
    undelivered: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Request digest → calls that ended without reaching the client, oldest first: call id, next attempt."""
    terminal: Terminal | None = None
    """The end as first written, so that a repeated finish writes equal bytes."""
    is_forgotten: bool = False
    """True once it made room for others; nothing more is remembered then."""

    def next_index(self, since_opening_ms: int) -> int:
        """The next call's index."""
        self.last_index = max(self.last_index + 1, since_opening_ms)
        return self.last_index

    def delta(self, prompt_ids: Ids) -> PromptDelta:
        """The prompt, against the base that shares most with it."""
        return encode_prompt(prompt_ids, self.bases)

    def retry_of(self, digest: str) -> tuple[str, int] | None:
        """Call id and attempt that a request with this digest continues; None for a new call.

        A retry is an equal request whose earlier answer did not arrive. An equal request while the earlier one is still
        open is a new call: scripts ask n times at once to get n samples.
        """
        waiting = self.undelivered.get(digest)
        if not waiting:
            return None
        found = waiting.pop(0)
        if not waiting:
            del self.undelivered[digest]
        return found

    def remember_undelivered(self, digest: str, call_id: str, call_attempt: int) -> None:
        """The call ended and its answer did not reach the client."""
        self.undelivered.setdefault(digest, []).append((call_id, call_attempt + 1))

    def put_back(self, digest: str, call_id: str, call_attempt: int) -> None:
        """A retry came to nothing before it was written: the next equal request is this attempt."""
        self.undelivered.setdefault(digest, []).insert(0, (call_id, call_attempt))


class MemoryOfRollouts:
    """All rollouts that are remembered; the least recently used go first."""

    def __init__(self, *, max_rollouts: int = _MAX_ROLLOUTS, max_ids: int = _MAX_IDS) -> None:
        self._rollouts: OrderedDict[tuple[str, int], RolloutMemory] = OrderedDict()
        self._ids = 0
        self._max_rollouts = max_rollouts
        self._max_ids = max_ids

    def __len__(self) -> int:
        return len(self._rollouts)

    def of(self, rollout_id: str, attempt: int) -> RolloutMemory:
        """What is remembered of an attempt; empty if nothing is."""
        key = (rollout_id, attempt)
        memory = self._rollouts.get(key)
        if memory is None:
            memory = self._rollouts[key] = RolloutMemory()
            if len(self._rollouts) > self._max_rollouts:
                self._forget_oldest()
        else:
            self._rollouts.move_to_end(key)
        return memory

    def add_base(
        self, memory: RolloutMemory, call_id: str, prompt_ids: Ids, output_ids: Ids, delta: PromptDelta
    ) -> None:
        """Remember an answer that the client got whole.

        Args: delta: how its prompt was written; a base that it holds whole is of no more use.
        """
        if memory.is_forgotten:
            return
        ids = np.concatenate([prompt_ids, output_ids])
        older = memory.bases.get(delta.base_call_id or "")
        if older is not None and len(older) == delta.base_len:
            self._ids -= len(memory.bases.pop(delta.base_call_id or ""))
        memory.bases[call_id] = ids
        self._ids += len(ids)
        if len(memory.bases) > _MAX_BASES:
            self._ids -= len(memory.bases.pop(next(iter(memory.bases))))
        while self._ids > self._max_ids and len(self._rollouts) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, memory = self._rollouts.popitem(last=False)
        self._ids -= sum(len(ids) for ids in memory.bases.values())
        memory.bases.clear()
        memory.is_forgotten = True
