"""Who ends by itself is counted and started again after a moment; who was killed by a fault is neither."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import Member
from rollstream.process import ServiceProcess

LATER_S = 60.0


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    """A process that stays until it is told to end by a file."""
    waits = "import pathlib, sys, time\nwhile not pathlib.Path('end').exists(): time.sleep(0.01)\nsys.exit(7)"
    process = ServiceProcess("one", [sys.executable, "-c", waits], log_file=tmp_path / "one.log", cwd=tmp_path)
    with process:
        yield Member(process)


def _end(member: Member, folder: Path) -> None:
    (folder / "end").touch()
    member.process.wait_exit(10)
    (folder / "end").unlink()


def test_member_that_ends_by_itself_is_counted_once_and_started_when_due(member: Member, tmp_path: Path) -> None:
    """The first look counts it, a later one starts it again."""
    _end(member, tmp_path)
    now_s = time.monotonic()

    looks = [member.look(now_s), member.look(now_s), member.look(now_s + LATER_S)]

    assert looks == [7, None, None]
    assert member.process.is_running()


def test_member_that_ends_at_once_again_waits_longer(member: Member, tmp_path: Path) -> None:
    """A process that cannot start does not spend the machine."""
    waits_s = []
    for _ in range(3):
        _end(member, tmp_path)
        now_s = time.monotonic()
        member.look(now_s)
        due_s = next(s for s in range(1, 60) if member.look(now_s + s) is None and member.process.is_running())
        waits_s.append(due_s)

    assert waits_s == sorted(waits_s)
    assert waits_s[0] < waits_s[-1]


def test_member_that_a_fault_killed_stays_down_until_it_is_started(member: Member) -> None:
    """The fault says how long it is down, and its death is not counted."""
    member.kill()

    seen = member.look(time.monotonic() + LATER_S)

    assert seen is None
    assert not member.process.is_running()
    member.start()
    assert member.process.is_running()


def test_member_that_is_not_wanted_is_left_alone(member: Member) -> None:
    """Scaled down is not dead."""
    member.want(False)

    seen = member.look(time.monotonic() + LATER_S)

    assert seen is None
    assert not member.process.is_running()
