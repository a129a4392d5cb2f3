"""A victim is back by what was seen after its fault, never by what was seen before."""

from __future__ import annotations

from chaos.positions import Positions, Recovery

OVER_S = 100.0


def _look(begun_s: float, end: int, committed: int) -> Positions:
    return Positions(begun_s, {("calls", 0): end}, {"sink": {("calls", 0): committed}}, frozenset())


def _sink() -> Recovery:
    return Recovery(OVER_S, OVER_S, lambda first, now: now.has_passed("sink", first.ends), needs_look=True)


def test_recovery_is_not_seen_in_a_look_from_before_the_end_of_the_fault() -> None:
    """What was begun too early proves nothing."""
    recovery = _sink()

    recovery.see(_look(OVER_S - 1, end=10, committed=10))

    assert recovery.took_s is None


def test_recovery_is_seen_once_the_first_ends_are_committed() -> None:
    """The log grows on; what it held at the end of the fault is what counts."""
    recovery = _sink()

    recovery.see(_look(OVER_S + 1, end=10, committed=5))
    was_back = recovery.took_s is not None
    recovery.see(_look(OVER_S + 2, end=20, committed=10))

    assert not was_back
    assert recovery.took_s is not None


def test_recovery_without_positions_needs_no_look_at_kafka() -> None:
    """A gateway is back when it answers, whatever the brokers do."""
    answers = [False, True]
    recovery = Recovery(OVER_S, OVER_S, lambda: answers.pop(0), needs_look=False)

    recovery.see(None)
    was_back = recovery.took_s is not None
    recovery.see(None)

    assert not was_back
    assert recovery.took_s is not None


def test_has_passed_counts_only_the_topics_asked_for() -> None:
    """A topic that a stage remembers on purpose does not keep the run from its end."""
    look = Positions(0, {("calls", 0): 3, ("groups", 0): 9}, {"g": {("calls", 0): 3}}, frozenset())

    passed = look.has_passed("g", look.ends, frozenset({"calls"}))

    assert passed
    assert not look.has_passed("g", look.ends)
