"""The ledger of held events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors.shell.ledger import Ledger


@st.composite
def _held_logs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Events with gaps between their offsets and one to three holders each, and all releases in any order."""
    gaps = draw(st.lists(st.integers(1, 5), min_size=1, max_size=30))
    offsets = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    events = [(offset, draw(st.integers(0, 7))) for offset in offsets]
    releases = [(offset, bit) for offset, holders in events for bit in (1, 2, 4) if holders & bit]
    return events, draw(st.permutations(releases + draw(st.lists(st.sampled_from(releases or [(0, 1)]), max_size=5))))


@given(_held_logs(), st.randoms(use_true_random=False))
def test_watermark_never_passes_a_held_event_and_ends_behind_the_last(log, random) -> None:  # type: ignore[no-untyped-def]
    """Whatever the order of arrivals and releases, nothing held is committed, and all is in the end."""
    events, releases = log
    ledger, held = Ledger(), {}
    waiting, marks = list(events), []

    for offset, bit in releases:
        while waiting and (offset >= waiting[0][0] or random.random() < 0.5):
            new, holders = waiting.pop(0)
            ledger.see(new, holders)
            held[new] = holders
        ledger.release(offset, bit)
        held[offset] = held.get(offset, 0) & ~bit
        mark = ledger.watermark
        assert mark is None or all(not left for at, left in held.items() if at < mark)
        marks.append(mark or 0)
    for offset, holders in waiting:
        ledger.see(offset, holders)
    for offset, holders in events:
        ledger.release(offset, holders)

    assert sorted(marks) == marks
    assert events[-1][0] + 1 == ledger.watermark
    assert ledger.held == 0


def test_ledger_takes_an_offset_once() -> None:
    """An event that is read again after a seek is not given out again, and a release is not undone."""
    ledger = Ledger()
    ledger.see(5, 1)
    ledger.release(5, 1)

    again = ledger.see(5, 1)

    assert not again
    assert ledger.watermark == 6


def test_ledger_follows_the_reader_over_markers_at_the_end() -> None:
    """Offsets without records at the log's end are committed once nothing before them is held."""
    ledger = Ledger()
    ledger.see(0, 1)
    ledger.advance(3)

    before, _, after = ledger.watermark, ledger.release(0, 1), ledger.watermark

    assert (before, after) == (0, 3)


def test_ledger_tells_the_oldest_held_event() -> None:
    """The age shown in metrics is that of the first held event in log order."""
    ledger = Ledger()
    ledger.see(0, 1, 100)
    ledger.see(1, 1, 200)

    ledger.release(0, 1)

    assert ledger.oldest_ms == 200


def test_ledger_takes_further_holders_of_what_is_held() -> None:
    """A dead letter on its way holds its event beside the stages; what is finished stays finished."""
    ledger = Ledger()
    ledger.see(0, 1)
    ledger.hold(0, 2)
    ledger.release(0, 1)
    before = ledger.watermark

    ledger.release(0, 2)
    ledger.hold(0, 2)

    assert (0, 1) == (before, ledger.watermark)


def test_ledger_tells_the_newest_event_seen() -> None:
    """Held or not, in log order or not."""
    ledger = Ledger()
    before = ledger.newest_ms

    for offset, time_ms in ((0, 5), (1, 9), (2, 7)):
        ledger.see(offset, 0, time_ms)

    assert (None, 9) == (before, ledger.newest_ms)
