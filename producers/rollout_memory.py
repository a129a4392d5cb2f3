"""What the gateway remembers of open rollouts: bases for prompt deltas, the order of calls, retries. An optimisation only.

A gateway that lost it (restart, another replica, too many rollouts) writes whole prompts and takes a retry for a new call;
nothing becomes wrong. Three rules make that so:

* `call_index` is the milliseconds since the rollout was opened, or one more than the last index if that is larger. The opening
  time is in the rollout's key, so indexes rise across restarts and replicas as far as their clocks agree.
* Only an answer that the client got whole is a base: nothing a client can echo is missed, and no other answer can carry the
  same call id with other ids.
* A request continues an earlier call only if they are equal and the earlier one did not reach its client, by the state of its
  connection. No harness sends an idempotency key, and a script that asks n times at once wants n samples.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.producers.engines.base import Ids
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import PromptDelta, Terminal

_MAX_ROLLOUTS = 10_000
_MAX_IDS = 50_000_000
"""Ids of all rollouts together: 200 MB."""
_MAX_BASES = 8
"""Bases of one rollout: its last calls, and with them the last call of each of a few sub-agents."""
_MAX_UNDELIVERED = 64
"""Undelivered calls of one rollout that may still be continued; an older one's retry is a new call."""


@dataclass(slots=True)
class Connection:
    """The connection that a call is served on."""

    is_gone: bool = False
    """The client has left."""
    is_cancellable: bool = True
    """The engine still works for it; afterwards the outcome is written whatever the client does."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """An attempt of a call that a further request may continue."""

    digest: str
    """Of the request."""
    call_id: str
    """The call."""
    call_attempt: int
    """The attempt, from 0."""
    connection: Connection
    """Where the answer goes."""
    task: asyncio.Task[Any] | None = None
    """What serves it, while it is served."""
    is_written: bool = False
    """Its intent was given to Kafka, so that its attempt number is taken."""
    is_over: bool = False
    """It has ended without an answer for the client."""
    is_replaced: bool = False
    """A further attempt has taken its place: nobody may see its answer any more."""

    @property
    def is_undelivered(self) -> bool:
        """Whether its client has not got an answer and never will."""
        return self.is_over or self.connection.is_gone

    def replace(self) -> None:
        """A further attempt takes its place; what still works for this one stops."""
        self.is_replaced = True
        was_gone, self.connection.is_gone = self.connection.is_gone, True
        if self.task is not None and self.connection.is_cancellable and not was_gone:
            self.task.cancel()


@dataclass(slots=True)
class RolloutMemory:
    """What is remembered of one rollout attempt."""

    last_index: int = -1
    bases: dict[str, Ids] = field(default_factory=dict)
    """Call id → (prompt ‖ output), oldest first."""
    open_calls: list[OpenCall] = field(default_factory=list)
    """Calls that are being served, and those that ended without reaching their client, oldest first."""
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

    def arrive(self, digest: str, new_call_id: str, connection: Connection, *, is_retry: bool) -> OpenCall:
        """A request has come: the next attempt of the oldest equal one that did not reach its client, else a new call.

        Args: is_retry: the client says that it sends this again. Then an equal one that is still open was given up by its
            client, even if its connection does not show it yet: it is stopped. Without that word an equal request beside an
            open one is another sample.
        """
        equal = [one for one in self.open_calls if one.digest == digest]
        earlier = next((one for one in equal if one.is_undelivered), equal[0] if equal and is_retry else None)
        if earlier is None:
            open_call = OpenCall(digest, new_call_id, 0, connection)
        else:
            self.open_calls.remove(earlier)
            earlier.replace()
            open_call = OpenCall(digest, earlier.call_id, earlier.call_attempt + earlier.is_written, connection)
        self.open_calls.append(open_call)
        return open_call

    def settle(self, open_call: OpenCall) -> None:
        """Its client gets the answer, or an error that sending it again would not change: nothing continues it."""
        if open_call in self.open_calls:
            self.open_calls.remove(open_call)

    def lose(self, open_call: OpenCall) -> None:
        """It has ended, and its client gets no answer; an equal request continues it. Does nothing for one that is settled."""
        open_call.is_over = True
        if not open_call.is_written and open_call.call_attempt == 0:
            self.settle(open_call)
        over = [one for one in self.open_calls if one.is_over]
        if len(over) > _MAX_UNDELIVERED:
            self.settle(over[0])

    def leaving(self) -> list[asyncio.Task[Any]]:
        """What still writes outcomes of calls whose client has left."""
        return [one.task for one in self.open_calls if one.connection.is_gone and one.task is not None]


class MemoryOfRollouts:
    """All rollouts that are remembered; the least recently used go first."""

    def __init__(self, *, max_rollouts: int = _MAX_ROLLOUTS, max_ids: int = _MAX_IDS) -> None:
        self._rollouts: OrderedDict[tuple[str, int], RolloutMemory] = OrderedDict()
        self._ids = 0
        self._max_rollouts = max_rollouts
        self._max_ids = max_ids

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def ids(self) -> int:
        """Ids of all bases together."""
        return self._ids

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
        while len(memory.bases) > 1 and (len(memory.bases) > _MAX_BASES or self._is_full(memory)):
            self._ids -= len(memory.bases.pop(next(iter(memory.bases))))
        while self._ids > self._max_ids and len(self._rollouts) > 1:
            self._forget_oldest()

    def _is_full(self, memory: RolloutMemory) -> bool:
        """Whether one rollout alone has as many ids as all may have."""
        return sum(map(len, memory.bases.values())) > self._max_ids

    def _forget_oldest(self) -> None:
        _, memory = self._rollouts.popitem(last=False)
        self._ids -= sum(len(ids) for ids in memory.bases.values())
        memory.bases.clear()
        memory.is_forgotten = True
