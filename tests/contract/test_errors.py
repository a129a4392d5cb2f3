"""The error tree: what crosses a process boundary arrives whole."""

from __future__ import annotations

import pickle

import pytest

from rollstream import errors
from rollstream.errors import RollstreamError, SinkError, boundary

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RollstreamError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_error_keeps_message_and_reason_when_pickled(cls: type[RollstreamError]) -> None:
    """A worker's error can be read in another process."""
    error = cls("cannot insert: rows=3, expected 4; look at the sink's log", reason="rows_missing")

    copy = pickle.loads(pickle.dumps(error))

    assert (type(copy), str(copy), copy.reason) == (cls, str(error), "rows_missing")


@pytest.mark.parametrize("cls", CLASSES)
def test_error_without_message_says_its_docstring(cls: type[RollstreamError]) -> None:
    """Every class has a sentence to fall back on."""
    assert str(cls()) == cls.__doc__


def test_boundary_converts_foreign_errors_and_keeps_the_cause() -> None:
    """What a library raises becomes one of ours, with the original behind it."""
    with (
        pytest.raises(SinkError, match="cannot insert batch: KeyError: 'x'") as caught,
        boundary(SinkError, "insert batch"),
    ):
        raise KeyError("x")

    assert isinstance(caught.value.__cause__, KeyError)


def test_boundary_lets_our_own_errors_pass() -> None:
    """An error that already says what to do is not wrapped again."""
    own = RollstreamError("already clear")

    with pytest.raises(RollstreamError) as caught, boundary(SinkError, "insert batch"):
        raise own

    assert caught.value is own
