"""The hole that a first prototype had, staged on the real stages: a finished item of which one half was committed.

Watermarks are per topic, so after a restart one half of it is read again. A stage that does not read its own output back makes
the item again, from that half. Each staging is run twice: with the stage as it is, and with one that does not read back, which
shows that the staging has the hole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollstream.processors.base import Event, Stage
from rollstream.schemas.records import Group, Rollout
from tests.unit.processors.shell.log import CODEC, Log
from tests.unit.processors.shell.stages import SOURCES, ended, observed, opened
from tests.unit.processors.simulation import default_pipeline

LONG_AFTER_MS = 1_000_000_000
"""Behind every deadline of the pipeline."""


class _Forgetful:
    """A stage whose own output is not read back, and that has no gate."""

    reads_own_output = False

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def own_output(self, event: Event) -> str | None:
        return None


def _stage(name: str) -> Stage:
    return next(stage for stage in default_pipeline().build_stages(0) if stage.name == name)


def _forgetful(name: str) -> Stage:
    return _Forgetful(_stage(name))  # type: ignore[return-value]


def _half_committed_rollout(join: Callable[[], Stage]) -> Log:
    """`done` is written and acknowledged, `slow` was sent and lost; `done`'s first event alone is committed."""
    log = Log(lambda: [join()])
    log.write("environment", observed("done", "a"))
    log.write("environment", observed("slow", "x", group="h"))
    log.write("environment", observed("done", "b"))
    log.write("calls", opened("slow", group="h"))
    log.write("calls", opened("done"))
    log.write("terminals", ended("slow", group="h"))
    log.write("terminals", ended("done"))
    for noun in ("calls", "environment"):
        log.write(noun, ended("done"))
        log.write(noun, ended("slow", group="h"))
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    lost = [outgoing for outgoing in log.partition.outbox if outgoing.message.key == b"h"]
    for outgoing in lost:
        log.partition.outbox.remove(outgoing)
    log.send()
    log.read("rollouts")
    log.commit()
    assert 1 == len(lost) == log.committed["environment"]
    assert (0, 0) == (log.committed["calls"], log.committed["terminals"])
    return log


def _half_committed_group(group: Callable[[], Stage]) -> Log:
    """Group `g` is written; its first member is committed, its second stands behind a member of an open group."""
    joined = Log(lambda: [_stage("join")])
    for name, of in (("r1", "g"), ("other", "h"), ("r2", "g")):
        joined.write("calls", opened(name, group=of))
        for noun in SOURCES:
            joined.write(noun, ended(name, group=of))
        joined.start() if name == "r1" else None
        joined.read_all()
    log = Log(lambda: [group()])
    log.topics["rollouts"] = joined.topics["rollouts"]
    log.start()
    log.read_all()
    log.commit()
    assert 1 == log.committed["rollouts"]
    return log


def _go_on(log: Log) -> None:
    """The worker is killed and starts; time passes."""
    log.start()
    for now_ms in (LONG_AFTER_MS, 2 * LONG_AFTER_MS, 3 * LONG_AFTER_MS):
        log.now_ms = now_ms
        log.read_all()
        log.partition.tick()
    log.read_all()
    log.commit()


def _ends(log: Log) -> dict[str, int]:
    return {noun: len(log.topics[noun]) for noun in log.partition.nouns}


def _contents(log: Log) -> list[list[str]]:
    records = [CODEC.decode(value or b"") for value in log.values("rollouts")]
    done = {r.digest: r for r in records if isinstance(r, Rollout) and r.rollout_id == "done"}
    return [[event.content for event in record.events] for record in done.values()]


def _members(log: Log) -> list[list[str]]:
    records = [CODEC.decode(value or b"") for value in log.values("groups")]
    groups = {g.digest: g for g in records if isinstance(g, Group) and g.group_id == "g"}
    return [[member.rollout_id for member in group.members] for group in groups.values()]


def test_rollout_of_which_one_half_was_committed_is_not_built_from_the_other() -> None:
    """Join reads back that it is done, lets go of its second half, and everything is committed."""
    log = _half_committed_rollout(lambda: _stage("join"))

    _go_on(log)

    assert [['"a"', '"b"']] == _contents(log)
    assert _ends(log) == log.committed


def test_staging_of_the_rollout_has_the_hole() -> None:
    """Without its own output, join writes the rollout a second time, without its first event."""
    log = _half_committed_rollout(lambda: _forgetful("join"))

    _go_on(log)

    assert [['"a"', '"b"'], ['"b"']] == _contents(log)


def test_group_of_which_one_half_was_committed_is_not_built_from_the_other() -> None:
    """Group reads back that it is closed; at its deadline nothing is written for the member that was read again."""
    log = _half_committed_group(lambda: _stage("group"))

    _go_on(log)

    assert [["r1", "r2"]] == _members(log)
    assert _ends(log) == log.committed


def test_staging_of_the_group_has_the_hole() -> None:
    """Without its own output, group closes the group again at its deadline, with one member."""
    log = _half_committed_group(lambda: _forgetful("group"))

    _go_on(log)

    assert [["r1", "r2"], ["r2"]] == _members(log)
