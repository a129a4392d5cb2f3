"""The guard tells a bad deploy from awkward data."""

from __future__ import annotations

import pytest

from rollstream.errors import StageError
from rollstream.processors.shell.guard import DeadLetterGuard


def fed(guard: DeadLetterGuard, records: int, every: int, reason: str) -> DeadLetterGuard:
    """The guard after so many records, each `every`-th of which became a dead letter."""
    for number in range(records):
        guard.record()
        if number % every == 0:
            guard.dead_letter(reason, "calls partition 0 offset 7")
    return guard


def test_guard_stops_when_too_many_records_cannot_be_used() -> None:
    """More than the tolerated part of the records is an error that names the last one."""
    with pytest.raises(StageError, match="offset 7") as caught:
        fed(DeadLetterGuard(0.2), 200, 4, "unknown_schema")

    assert caught.value.reason == "too_many_dead_letters"


def test_guard_goes_on_below_the_limit_and_before_a_ratio_means_anything() -> None:
    """A tenth is tolerated at a limit of a fifth, and so is anything among the first records."""
    fed(DeadLetterGuard(0.2), 2_000, 10, "unknown_schema")
    fed(DeadLetterGuard(0.2), 99, 1, "unknown_schema")


@pytest.mark.parametrize(
    "reason", ["late", "late_for_group", "superseded", "no_opening", "already_done", "not_counted"]
)
def test_guard_does_not_count_what_a_harness_brings_about(reason: str) -> None:
    """Records that come too late are understood: any number of them leaves the worker running."""
    fed(DeadLetterGuard(0.2), 2_000, 1, reason)


def test_guard_has_judged_once_enough_records_were_seen_and_few_of_them_were_buried() -> None:
    """Until then nobody knows whether what was buried is the fault of the data or of the deploy."""
    early, good = (
        fed(DeadLetterGuard(0.2), 99, 10, "unknown_schema"),
        fed(DeadLetterGuard(0.2), 100, 10, "unknown_schema"),
    )
    bad = fed(DeadLetterGuard(0.2), 99, 1, "unknown_schema")
    bad.record()

    assert (False, True, False) == (early.has_judged, good.has_judged, bad.has_judged)
