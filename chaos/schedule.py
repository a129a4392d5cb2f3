"""When what breaks: from a seed, a length and the kinds of faults to a list. Pure; equal arguments give an equal list.

A lane is what suffers one fault at a time: all brokers are one lane, so no two are ever down at once on purpose; each gateway,
worker and sink is a lane of its own. Faults of different lanes overlap as chance has it. The kinds of a group of lanes are dealt
like cards: none comes again before the others were there, so every kind appears in any schedule that is long enough.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from rollstream.errors import RollstreamError


class ScheduleTooShort(RollstreamError):
    """Not all kinds of faults fit into the time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    name: str
    """Such as `broker_kill`."""
    group: str
    """The lanes it belongs to; a key of `GROUPS`."""
    least_s: float
    """How long it lasts at least, in seconds."""
    most_s: float
    """How long it lasts at most, in seconds."""
    only: str | None = None
    """The one target it makes sense for; None for any of the group."""


@dataclass(frozen=True, slots=True)
class Group:
    """Lanes with the same kinds of faults."""

    lanes: tuple[tuple[str, ...], ...]
    """The targets of each lane; a lane has one fault at a time."""
    every_s: float
    """How often a lane has a fault, on average, in seconds from begin to begin."""
    rest_s: float
    """The least time between two faults of a lane, in seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int
    """From 1, in order of their begins."""
    kind: str
    """Name of the kind."""
    group: str
    """Group of its lane."""
    target: str
    """Who suffers it."""
    begin_s: float
    """Seconds after the start."""
    lasts_s: float
    """Seconds until it is taken back."""


SESSION_S = 6.0
"""Session timeout of our consumers: who is silent for longer loses its partitions."""
BROKER_SESSION_S = 4.0
"""Session timeout of brokers at the controller: who is silent for longer is fenced."""

GROUPS = {
    "broker": Group((("broker-1", "broker-2", "broker-3"),), every_s=60, rest_s=6),
    "gateway": Group((("gateway-1",), ("gateway-2",)), every_s=60, rest_s=2),
    "worker": Group((("worker-1",), ("worker-2",)), every_s=80, rest_s=3),
    "sink": Group((("sink-clickhouse",), ("sink-objects",)), every_s=75, rest_s=3),
    "clickhouse": Group((("clickhouse",),), every_s=45, rest_s=2),
    "s3": Group((("s3",),), every_s=60, rest_s=2),
    "engine": Group((("engine",),), every_s=45, rest_s=2),
}
"""All lanes. On average 9 faults a minute: 30 minutes hold more than 200, with room for a machine that is busy."""

KINDS = (
    Kind("broker_kill", "broker", 1, 5),
    Kind("broker_pause", "broker", BROKER_SESSION_S + 2, BROKER_SESSION_S + 6),
    Kind("broker_partition", "broker", BROKER_SESSION_S + 2, BROKER_SESSION_S + 6),
    Kind("broker_slow_disk", "broker", 8, 16),
    Kind("gateway_kill", "gateway", 0.5, 3),
    Kind("gateway_pause", "gateway", 1, 4),
    Kind("gateway_partition", "gateway", 3, 8),
    Kind("worker_kill", "worker", 0.5, 3),
    Kind("worker_zombie", "worker", SESSION_S + 2, SESSION_S + 6),
    Kind("worker_partition", "worker", SESSION_S + 2, SESSION_S + 6),
    Kind("scale_up", "worker", 8, 16, only="worker-2"),
    Kind("scale_down", "worker", 6, 14, only="worker-2"),
    Kind("sink_kill", "sink", 0.5, 3),
    Kind("sink_pause", "sink", SESSION_S + 2, SESSION_S + 6),
    Kind("clickhouse_kill", "clickhouse", 1, 4),
    Kind("clickhouse_busy", "clickhouse", 2, 5),
    Kind("clickhouse_error", "clickhouse", 2, 5),
    Kind("clickhouse_reset_before", "clickhouse", 2, 5),
    Kind("clickhouse_reset_after", "clickhouse", 2, 5),
    Kind("clickhouse_hang", "clickhouse", 2, 6),
    Kind("clickhouse_hang_after", "clickhouse", 2, 6),
    Kind("clickhouse_too_many_parts", "clickhouse", 2, 5),
    Kind("s3_kill", "s3", 1, 4),
    Kind("s3_pause", "s3", 2, 6),
    Kind("engine_kill", "engine", 0.5, 2),
    Kind("engine_pause", "engine", 1, 3),
    Kind("engine_error", "engine", 1, 3),
    Kind("engine_cut", "engine", 1, 3),
    Kind("engine_hang", "engine", 1, 3),
)
"""Every kind of fault that `faults.py` can inflict."""

_TIGHTER = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
_FIRST_S = 2.0


def make_schedule(seed: int, seconds: float, kinds: Sequence[Kind] = KINDS) -> tuple[Fault, ...]:
    """The faults of a run, by their begin.

    Args:
        seed: decides all of it.
        seconds: when the last fault is over at the latest.
        kinds: those that are possible on this machine.
    Raises: ScheduleTooShort: a kind does not fit in.
    """
    drafts: list[Fault] = []
    for name, group in GROUPS.items():
        own = [kind for kind in kinds if kind.group == name]
        if own:
            drafts += _fill_group(name, group, own, seed, seconds)
    drafts.sort(key=lambda fault: (fault.begin_s, fault.target))
    return tuple(
        Fault(number, f.kind, f.group, f.target, f.begin_s, f.lasts_s) for number, f in enumerate(drafts, start=1)
    )


def _fill_group(name: str, group: Group, kinds: list[Kind], seed: int, seconds: float) -> list[Fault]:
    """Faults of a group's lanes, with rests as long as they can be for every kind to be there."""
    wanted = {kind.name for kind in kinds}
    for tightness in _TIGHTER:
        faults = _deal(name, group, kinds, random.Random(f"{seed}/{name}"), seconds, tightness)
        if {fault.kind for fault in faults} == wanted:
            return faults
    missing = ", ".join(sorted(wanted - {fault.kind for fault in faults}))
    raise ScheduleTooShort(f"cannot fit {missing} into seconds={seconds:g}; let it run for longer")


def _deal(
    name: str, group: Group, kinds: list[Kind], dice: random.Random, seconds: float, tightness: float
) -> list[Fault]:
    mean_s = sum(kind.least_s + kind.most_s for kind in kinds) / 2 / len(kinds)
    spare_s = max(group.every_s - mean_s - group.rest_s, 0.0) * tightness
    free_s = [_FIRST_S + dice.uniform(0, spare_s) for _ in group.lanes]
    targets = [cycle(dice.sample(lane, len(lane))) for lane in group.lanes]
    faults: list[Fault] = []
    bag: list[Kind] = []
    while True:
        bag = bag or dice.sample(kinds, len(kinds))
        kind = bag.pop()
        lanes = [i for i, lane in enumerate(group.lanes) if kind.only is None or kind.only in lane]
        lane = min(lanes, key=lambda i: free_s[i])
        lasts_s = round(dice.uniform(kind.least_s, kind.most_s), 3)
        begin_s = round(free_s[lane], 3)
        if begin_s + lasts_s > seconds:
            return faults
        faults.append(Fault(0, kind.name, name, next(targets[lane]), begin_s, lasts_s))
        free_s[lane] = begin_s + lasts_s + group.rest_s + dice.uniform(0, 2 * spare_s)
