"""A store filled without a sink's loop."""

from __future__ import annotations

import pytest

from rollstream.errors import SinkError
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import RolloutOpened
from rollstream.schemas.types import Json
from rollstream.sinks.base import Chunk, SinkBusy, Source
from rollstream.sinks.fill import MADE, Fill
from rollstream.sinks.memory import MemorySink
from rollstream.snapshot import Logged

VALUE = Codec().encode(RolloutOpened("r-1", 0, "g-1", 2, "task", 1_000, Json("{}")))


def _logged(offset: int, topic: str = "p.calls.v1") -> Logged:
    return Logged(topic, 0, offset, 1_000, b"g-1", VALUE)


def test_fill_keeps_what_was_copied_apart_from_what_was_made() -> None:
    """Copies have the topic's id, so that a sink goes on behind them; what was made has one of its own."""
    sink = MemorySink()
    fill = Fill(sink, 2, {"p.calls.v1": "id"})

    for offset in range(3):
        fill.copy(_logged(offset + 5))
        fill.write(_logged(offset, "p.rollouts.v1"))
    fill.flush()

    assert sink.positions() == {Source("p.calls.v1", 0, "id"): 8, Source("p.rollouts.v1", 0, MADE): 3}


def test_fill_refuses_a_store_that_holds_something() -> None:
    """A rebuild is never mixed into stored data."""
    sink = MemorySink()
    first = Fill(sink, 2, {})
    first.write(_logged(0))
    first.flush()

    with pytest.raises(SinkError, match="holds records already"):
        Fill(sink, 2, {})


def test_fill_waits_for_a_busy_store_and_gives_up_after_minutes() -> None:
    """A chunk is written again until the store takes it; not for ever."""
    slept: list[float] = []

    class Busy(MemorySink):
        times = 2

        def write(self, chunks: list[Chunk]) -> int:  # type: ignore[override]
            self.times -= 1
            if self.times >= 0:
                raise SinkBusy(retry_after_s=200.0)
            return super().write(chunks)

    sink = Busy()
    fill = Fill(sink, 2, {}, clock=lambda: sum(slept), sleep=slept.append)
    fill.write(_logged(0))
    fill.flush()
    waited = list(slept)
    sink.times = 9
    fill.write(_logged(2))

    with pytest.raises(SinkBusy):
        fill.flush()
    assert waited == [200.0, 200.0]
    assert sink.positions() == {Source("p.calls.v1", 0, MADE): 1}
