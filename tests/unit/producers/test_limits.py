"""Places for calls."""

from __future__ import annotations

import pytest

from rollstream.producers.dialects.base import Problem, RequestRefused
from rollstream.producers.gateway.limits import Admission


def test_place_is_free_again_after_a_call_however_it_ended() -> None:
    """A call that fails gives its place back, too."""
    admission = Admission(max_calls=1, max_backlog=10, backlog=lambda: 0)

    with pytest.raises(KeyError), admission.place():
        raise KeyError

    with admission.place():
        assert 1 == admission.taken
    assert 0 == admission.taken


def test_call_beyond_the_last_place_is_told_when_to_come_again() -> None:
    """And those before it keep theirs."""
    admission = Admission(max_calls=2, max_backlog=10, backlog=lambda: 0)

    with admission.place(), admission.place(), pytest.raises(RequestRefused) as refused, admission.place():
        pass

    assert (Problem.RATE_LIMITED, "too_many_calls", 1) == (
        refused.value.problem, refused.value.code, refused.value.retry_after_s,
    )  # fmt: skip


@pytest.mark.parametrize(("waiting", "is_refused"), [(10, False), (11, True)])
def test_backlog_beyond_its_limit_takes_nothing_on(waiting: int, is_refused: bool) -> None:
    """Until Kafka has caught up."""
    admission = Admission(max_calls=2, max_backlog=10, backlog=lambda: waiting)

    try:
        with admission.place():
            code = None
    except RequestRefused as refused:
        code = refused.code

    assert ("backlog" if is_refused else None) == code
