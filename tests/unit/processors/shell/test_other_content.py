"""The log holds another content of an item than this run has made: what is in ours alone is buried before it is committed.

Two workers decide differently where a deadline decides by arrival: the first closes a group with one member, dies before it has
committed, and the second finds two. What came first into the log counts.
"""

from __future__ import annotations

from rollstream.processors.base import Stage
from rollstream.schemas.records import DeadLetter, Group
from tests.unit.processors.shell.log import CODEC, Log
from tests.unit.processors.shell.stages import SOURCES, ended, opened
from tests.unit.processors.simulation import default_pipeline

LONG_AFTER_MS = 1_000_000_000
"""Behind the group's deadline."""


def _stage(name: str) -> Stage:
    return next(stage for stage in default_pipeline().build_stages(0) if stage.name == name)


def _rollouts() -> Log:
    """A log of two rollouts of one group of two, that group alone reads."""
    joined = Log(lambda: [_stage("join")])
    for name in ("r1", "r2"):
        joined.write("calls", opened(name))
        for noun in SOURCES:
            joined.write(noun, ended(name))
    joined.start()
    joined.read_all()
    log = Log(lambda: [_stage("group")])
    log.topics["rollouts"] = joined.topics["rollouts"]
    return log


def _closed_with_one() -> Group:
    """What a worker writes that sees the first rollout alone, until the group's deadline."""
    log = _rollouts()
    del log.topics["rollouts"][1:]
    log.start()
    log.now_ms = LONG_AFTER_MS
    log.read_all()
    log.partition.tick()
    log.send()
    [value] = log.values("groups")
    group = CODEC.decode(value or b"")
    assert isinstance(group, Group)
    return group


def _letters(log: Log) -> list[tuple[str, int]]:
    letters = [CODEC.decode(value or b"") for value in log.values("dead-letters")]
    return [(letter.reason, letter.offset) for letter in letters if isinstance(letter, DeadLetter)]


def _buried(log: Log) -> list[int]:
    """Watermarks of the rollouts: before the second one's dead letter is asked for, sent, and acknowledged."""
    marks = [log.partition.watermarks()["rollouts"]]
    log.now_ms += 1
    for noun in log.partition.nouns:
        log.read(noun)
    log.partition.tick()
    log.send(ack=False)
    marks.append(log.partition.watermarks()["rollouts"])
    for outgoing in log.unacked:
        outgoing.on_ack(outgoing, 0)
    log.partition.tick()
    return [*marks, log.partition.watermarks()["rollouts"]]


def test_member_of_a_kept_group_is_held_until_it_is_buried_when_the_log_has_another() -> None:
    """Behind the gate the group was made of two rollouts; the log says one. The other is late, and told before its commit."""
    log = _rollouts()
    log.write("groups", _closed_with_one())
    log.start()
    log.read("rollouts")

    log.read("groups")

    assert [1, 1, 2] == _buried(log)
    assert [("late_for_group", 1)] == _letters(log)


def test_member_of_a_sent_group_is_held_until_it_is_buried_when_the_log_has_another_before() -> None:
    """Ours was under way when the other worker's came into the log; ours is acknowledged after that one was read."""
    log = _rollouts()
    log.start()
    log.read("groups")
    log.read("rollouts")
    [ours] = log.partition.outbox
    log.partition.outbox.clear()
    log.write("groups", _closed_with_one())
    log.read("groups")

    ours.on_ack(ours, 1)

    assert [1, 1, 2] == _buried(log)
    assert [("late_for_group", 1)] == _letters(log)
