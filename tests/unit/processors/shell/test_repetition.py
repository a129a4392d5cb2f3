"""A second record about a call that is held as bytes: said again it is let go of, with other content it is buried; also after a
restart.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollstream.schemas.records import DeadLetter, ModelCall, Rollout
from tests.unit.processors.records import call, opened, terminal
from tests.unit.processors.shell.log import CODEC, Log
from tests.unit.processors.shell.stages import SOURCES
from tests.unit.processors.simulation import default_pipeline

FIRST = call("c-1")
OTHER = replace(FIRST, error="another story")


def _log(*calls: ModelCall) -> Log:
    """A log that join reads: a rollout with these calls, without its end."""
    log = Log(lambda: default_pipeline().build_stages(0)[:1])
    for record in (opened(), *calls):
        log.write("calls", record)
    return log


def _finish(log: Log) -> None:
    """Write the barrier, read on, and let time pass."""
    for noun in SOURCES:
        log.write(noun, terminal())
    _read_on(log)
    log.commit()


def _read_on(log: Log) -> None:
    log.read_all()
    log.partition.tick()
    log.read_all()


def _calls(log: Log) -> list[tuple[ModelCall, ...]]:
    """Of each rollout that was written."""
    records = [CODEC.decode(value or b"") for value in log.values("rollouts")]
    return [record.calls for record in records if isinstance(record, Rollout)]


def _letters(log: Log) -> list[tuple[str, int]]:
    """Reason and offset of each dead letter."""
    records = [CODEC.decode(value or b"") for value in log.values("dead-letters")]
    return [(record.reason, record.offset) for record in records if isinstance(record, DeadLetter)]


@pytest.mark.parametrize("read_before", [1, 2, 3])
def test_call_with_another_content_is_buried_with_the_first_after_a_restart(read_before: int) -> None:
    """However much of them an earlier run had read; its last commit is behind the opening."""
    log = _log(FIRST, OTHER)
    log.start()
    log.read("calls", upto=read_before)
    log.commit()

    log.start()
    _finish(log)

    assert [()] == _calls(log)
    assert [("conflict", 1), ("conflict", 2)] == _letters(log)
    assert {"calls": 4, "environment": 1, "terminals": 1} == {noun: log.committed[noun] for noun in SOURCES}


def test_call_that_comes_after_its_rollout_was_written_is_told_from_a_repetition_after_a_restart() -> None:
    """A restart learns from the rollout in its own output what each call said."""
    log = _log(FIRST)
    log.start()
    _finish(log)
    log.committed = {}
    for record in (FIRST, OTHER):
        log.write("calls", record)

    log.start()
    _read_on(log)

    assert [(FIRST,)] == _calls(log)
    assert [("late", 4)] == _letters(log)
