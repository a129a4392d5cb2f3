"""One stage as the shell hosts it: its bit in the ledgers, and its gate.

Until a stage that reads its own output has read it to the end it had at assignment, nothing leaves: what the stage wants
to emit, reject or run is kept. An emit or reject is dropped when the stage's own output shows that its item is done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollstream.processors.base import Emit, Position, Reject, Stage, Work


@dataclass(slots=True)
class Hosted:
    """A stage of one partition."""

    stage: Stage
    """The stage."""
    bit: int
    """Its bit among the holders of an event."""
    needs: frozenset[str]
    """Topics that must be read to their ends before time may pass for it: all that lies upstream in this process."""
    upstream: tuple[Hosted, ...] = ()
    """The stages that write to `needs`."""
    is_open: bool = False
    """Whether the gate is open."""
    gate_end: int = 0
    """The own output topic's end at assignment."""
    heard_ms: int = 0
    """The time that was passed to it last."""
    in_flight: Counter[int] = field(default_factory=Counter)
    """Items given to the broker and not yet acknowledged, by `heard_ms` when they were."""
    kept_emits: dict[str, Emit] = field(default_factory=dict)
    """Item → what it wants to emit, behind the gate."""
    kept_rejects: dict[Position, Reject] = field(default_factory=dict)
    """What it wants to reject, behind the gate."""
    kept_work: list[Work] = field(default_factory=list)
    """What it wants to run, behind the gate."""

    @property
    def settled_ms(self) -> int | None:
        """Up to which time all that it makes is in the log; None: all there is to make.

        Not whether anything is on its way: in a busy partition something always is.
        """
        if not self.is_open:
            return 0
        pending_ms = self.stage.pending_ms
        return min([*self.in_flight, *(() if pending_ms is None else (pending_ms,))], default=None)

    def send(self) -> int:
        """An item is given to the broker. Returns: what `sent` has to be told."""
        self.in_flight[self.heard_ms] += 1
        return self.heard_ms

    def sent(self, since_ms: int) -> None:
        """It is acknowledged."""
        self.in_flight[since_ms] -= 1
        if not self.in_flight[since_ms]:
            del self.in_flight[since_ms]


@dataclass(frozen=True, slots=True)
class Running:
    """Work to start for a stage."""

    hosted: Hosted
    """Whose work."""
    work: Work
    """What to run."""


def host(stages: list[Stage]) -> list[Hosted]:
    """Wrap the stages of one partition, in pipeline order.

    Raises: ValueError: a stage reads its own output as an input, or two stages have one name or one output.
    """
    hosted: list[Hosted] = []
    for index, stage in enumerate(stages):
        clash = [
            other.stage for other in hosted if stage.name == other.stage.name or stage.output == other.stage.output
        ]
        if clash or stage.output in stage.inputs:
            raise ValueError(
                f"cannot host stage {stage.name!r}: it writes {stage.output!r} and reads {stage.inputs!r}; a stage may "
                f"not read its own output as input, and no two may share a name or an output (clash: {clash!r})"
            )
        upstream = tuple(other for other in hosted if other.stage.output in stage.inputs)
        needs = set(stage.inputs).union(*(other.needs for other in upstream))
        if stage.reads_own_output:
            needs.add(stage.output)
        hosted.append(Hosted(stage, 1 << index, frozenset(needs), _closure(upstream)))
    return hosted


def _closure(stages: tuple[Hosted, ...]) -> tuple[Hosted, ...]:
    found = {id(one): one for stage in stages for one in (*stage.upstream, stage)}
    return tuple(found.values())
