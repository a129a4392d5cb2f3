"""How long a stage's own output stays uncommitted where the stage remembers."""

from __future__ import annotations

from dataclasses import replace

from rollstream.schemas.records import DeadLetter
from tests.unit.processors.shell.log import CODEC, Log
from tests.unit.processors.shell.stages import SOURCES, Gather, Join, Relabel, ended, observed, opened

REMEMBERED_MS = 10_000
CLOSED_MS = 2_000
"""When the fake stages' records say that rollout and group ended; the log takes it for the append time."""


def _write_rollout(log: Log, rollout: str, group: str = "g", *, size: int = 1, at_ms: int = CLOSED_MS) -> None:
    log.write("calls", opened(rollout, group=group, size=size, at_ms=at_ms - 1))
    for noun in ("calls", "environment", "terminals"):
        log.write(noun, ended(rollout, group=group, size=size, at_ms=at_ms))


def _gathers(log: Log) -> Gather:
    return log.stages[-1]  # type: ignore[return-value]


def _started(*, now_ms: int = CLOSED_MS, joins: bool = True) -> Log:
    log = Log(lambda: [*([Join()] if joins else []), Gather(remembers_ms=REMEMBERED_MS)], now_ms=now_ms)
    if joins:
        _write_rollout(log, "r1")
    log.start()
    log.read_all()
    return log


def _tick(log: Log, now_ms: int) -> None:
    log.now_ms = now_ms
    log.read_all()
    log.partition.tick()


def test_own_output_is_remembered_until_all_that_is_read_is_younger() -> None:
    """With nothing open, the wall clock at which the end was proven counts; the item is forgotten with its release."""
    log = _started()
    marks = []

    for now_ms in (CLOSED_MS + REMEMBERED_MS - 1, CLOSED_MS + REMEMBERED_MS):
        _tick(log, now_ms)
        marks.append((log.partition.watermarks()["groups"], list(_gathers(log).forgotten)))

    assert [(0, []), (1, ["g/0"])] == marks


def test_open_rollout_upstream_keeps_what_is_remembered() -> None:
    """Its group may be one that is remembered: however late it is, what was decided before it ends is still known."""
    log = _started()
    log.write("calls", opened("late", group="g", at_ms=CLOSED_MS + REMEMBERED_MS - 1))
    _tick(log, 100 * REMEMBERED_MS)
    before = log.partition.watermarks()["groups"]

    for noun in ("calls", "environment", "terminals"):
        log.write(noun, ended("late", group="g", size=1, at_ms=99 * REMEMBERED_MS))
    _tick(log, 100 * REMEMBERED_MS)

    letters = [CODEC.decode(value) for value in log.values("dead-letters") if value]
    assert ["late_for_group"] == [letter.reason for letter in letters if isinstance(letter, DeadLetter)]
    assert (0, 1) == (before, log.partition.watermarks()["groups"])


def test_younger_open_rollout_does_not_keep_what_is_remembered() -> None:
    """What began `remembers_ms` after the group was written is none of its members."""
    log = _started()

    log.write("calls", opened("other", group="h", at_ms=CLOSED_MS + REMEMBERED_MS))
    _tick(log, CLOSED_MS + REMEMBERED_MS)

    assert (1, ["g/0"]) == (log.partition.watermarks()["groups"], _gathers(log).forgotten)


def test_what_is_behind_is_measured_by_the_newest_event_that_was_read() -> None:
    """While a topic is not read to its end, the clock says nothing about what is still to come."""
    log = _started()
    log.now_ms = 100 * REMEMBERED_MS
    for noun in log.partition.nouns:
        log.partition.passed(noun, log.position[noun], None)

    log.partition.tick()
    before = log.partition.watermarks()["groups"]
    for at_ms, rollout in ((CLOSED_MS + REMEMBERED_MS, "r2"), (CLOSED_MS + REMEMBERED_MS, "r3")):
        _write_rollout(log, rollout, "h", size=2, at_ms=at_ms)
    for _ in range(3):
        for noun in log.partition.nouns:
            log.read(noun)
            log.partition.passed(noun, log.position[noun], None)
        log.send()
    log.partition.tick()

    assert (0, ["g/0"]) == (before, _gathers(log).forgotten)


def test_unread_topic_keeps_what_is_remembered() -> None:
    """Of a topic without any event read and not proven empty, nothing is known."""
    log = Log(lambda: [Gather(remembers_ms=REMEMBERED_MS)])
    log.write("groups", _group())
    log.start()
    log.read("groups")

    log.partition.tick()
    before = log.partition.watermarks()["groups"]
    log.now_ms = CLOSED_MS + REMEMBERED_MS
    log.read("rollouts")
    log.partition.tick()

    assert (0, 1) == (before, log.partition.watermarks()["groups"])


def test_late_member_is_told_after_a_restart() -> None:
    """The group is read back although all it was made of is committed, so its late member opens no new group."""
    log = _started()
    log.commit()
    _write_rollout(log, "late")

    log.start()
    log.read_all()

    assert {"calls": 2, "rollouts": 1, "groups": 0} == {n: log.committed[n] for n in ("calls", "rollouts", "groups")}
    assert 1 == len(log.topics["groups"])
    assert 1 == len(log.topics["dead-letters"])


def _restarted(*, with_metadata: bool) -> Log:
    log = Log(lambda: [Gather(remembers_ms=REMEMBERED_MS), Relabel("score", "groups", "scores")])
    log.topics["rollouts"] = _started().topics["rollouts"]
    log.start()
    log.read_all()
    log.commit()
    assert ({"rollouts": 1, "groups": 0, "scores": 1}, 1) == (log.committed, log.finished["groups"])
    if not with_metadata:
        log.finished.clear()
    log.start()
    log.read_all()
    log.commit()
    return log


def test_what_is_read_again_for_the_memory_is_not_given_to_other_stages() -> None:
    """An hour of groups is read back, and none is scored again; without what is committed beside the offset all are."""
    restarted, naive = _restarted(with_metadata=True), _restarted(with_metadata=False)

    assert (1, 2) == (len(restarted.topics["scores"]), len(naive.topics["scores"]))
    assert {"g/0"} == _gathers_first(restarted).done
    assert (0, 1) == (restarted.committed["groups"], restarted.finished["groups"])


def test_commit_before_the_memory_is_read_loses_none_of_it() -> None:
    """A second kill, before the memory was read to its end, finds the same: what to read again, and what is finished."""
    log = _restarted(with_metadata=True)
    log.start()

    log.commit()

    assert (0, 1) == (log.committed["groups"], log.finished["groups"])
    log.start()
    log.read_all()
    assert {"g/0"} == _gathers_first(log).done


def test_bytes_among_what_is_remembered_are_buried_once() -> None:
    """They were dead letters when they were read for the first time; read for the memory again they are passed over."""
    log = Log(lambda: [Gather(remembers_ms=REMEMBERED_MS)])
    log.write("groups", _group())
    log.write_bytes("groups", b"junk")
    for _ in range(2):
        log.start()
        log.read_all()
        log.commit()

    assert (0, 2) == (log.committed["groups"], log.finished["groups"])
    assert 1 == len(log.topics["dead-letters"])


def _gathers_first(log: Log) -> Gather:
    return log.stages[0]  # type: ignore[return-value]


def test_remembering_counts_only_what_waits() -> None:
    """The memory is a place and a name an item, and it is given back."""
    log = _started()
    before = log.partition._releases.waiting

    _tick(log, CLOSED_MS + REMEMBERED_MS)

    assert (1, 0) == (before, log.partition._releases.waiting)


def test_remembered_output_does_not_count_as_oldest_held() -> None:
    """The age in the metrics is that of unfinished events, not the time that a stage is set to remember."""
    log = _started()
    before = log.partition.oldest_ms

    log.write("calls", opened("open", at_ms=7_000))
    log.read("calls")

    assert (None, 7_000) == (before, log.partition.oldest_ms)


def test_stage_hears_what_no_restart_will_tell_it_again() -> None:
    """Also one that is not set to remember: as soon as what its output was made of is passed."""
    log = Log(lambda: [Join()])
    log.write("environment", observed("open", "x"))
    _write_rollout(log, "r1")
    log.start()
    log.read_all()
    before = list(log.stages[0].forgotten)  # type: ignore[attr-defined]

    log.write("calls", opened("open"))
    for noun in SOURCES:
        log.write(noun, ended("open"))
    log.read_all()

    assert ([], {"r1/0", "open/0"}) == (before, set(log.stages[0].forgotten))  # type: ignore[attr-defined]


def test_doubled_output_is_let_go_of_in_turn() -> None:
    """Two copies of one output are two places; both are released, and the item is forgotten."""
    log = _started()
    message = log.topics["groups"][0]
    log.topics["groups"].append(replace(message, offset=1, timestamp=CLOSED_MS + 5))

    _tick(log, CLOSED_MS + REMEMBERED_MS)
    first = log.partition.watermarks()["groups"]
    _tick(log, CLOSED_MS + REMEMBERED_MS + 5)

    assert (1, 2) == (first, log.partition.watermarks()["groups"])
    assert {"g/0"} == set(_gathers(log).forgotten)


def _group():  # type: ignore[no-untyped-def]
    return CODEC.decode(_started().values("groups")[0] or b"")
