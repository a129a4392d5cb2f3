"""What stages hold of what is open, and remember of what is done, as long as a partition stays where it is."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest

from rollstream.processors import stateless
from rollstream.processors.base import Event, Position, Stage
from rollstream.processors.content import mark
from rollstream.processors.ledger import Ledger
from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.parsed import Parsed
from rollstream.schemas.records import EnvironmentEvent, ModelCall, Record
from tests.unit.processors.joining import barrier
from tests.unit.processors.records import call, conversation, happened, opened, started
from tests.unit.processors.simulation import default_pipeline

PIPELINE: Pipeline = default_pipeline()
CODEC = Codec()


class Reader:
    """Feeds one stage as the shell does: bytes in, decoded once, thin afterwards; counts what is decoded again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.num_bytes = 0
        self.num_events = 0
        self.decoded: Counter[bytes] = Counter()
        self._decode_again = self._decode

    def feed(self, noun: str, record: Record) -> None:
        """Give one record."""
        value = CODEC.encode(record)
        position = Position(noun, 0, 1_000_000 + self.num_events)
        event = Event(position, CODEC.parse(value), event_time_ms(record), value, b"g-1", self._decode_again)
        self.num_bytes += len(value)
        self.num_events += 1
        self.stage.apply(event)
        event.thin()

    def feed_rollouts(self, count: int, calls: int, tokens: int) -> None:
        """Give open rollouts of so many calls, with so many sampled tokens each."""
        talk = conversation(calls, tokens // calls)
        for number in range(count):
            rollout_id = f"rollout-{number:08d}"
            self.feed("calls", opened(rollout_id))
            for one in talk:
                one = replace(one, rollout_id=rollout_id, call_id=f"{rollout_id}.{one.call_id}")
                self.feed("calls", started(one))
                self.feed("calls", one)
                self.feed("environment", happened(f"e-{one.call_id}", rollout_id))

    def _decode(self, value: bytes) -> Record:
        self.decoded[value] += 1
        return CODEC.decode(value)


def traced(count: int, calls: int, tokens: int) -> tuple[int, Reader]:
    """Bytes that open rollouts take in memory, and what fed them."""
    Reader(PIPELINE.build_stages(0)[0]).feed_rollouts(1, 1, 1)  # what codecs load once
    gc.collect()
    tracemalloc.start()
    reader = Reader(PIPELINE.build_stages(0)[0])
    reader.feed_rollouts(count, calls, tokens)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used, reader


def test_join_holds_an_open_rollout_in_little_more_than_its_encoded_bytes() -> None:
    """Rollouts of 20 calls and 50,000 tokens take less than 1.2 times what they are in the log."""
    used, reader = traced(4, 20, 50_000)

    assert used < 1.2 * reader.num_bytes


def test_join_holds_an_event_with_less_than_700_bytes_beside_its_own() -> None:
    """Small events are many: what is known of each one is a few numbers."""
    used, reader = traced(100, 20, 40)

    assert (used - reader.num_bytes) / reader.num_events < 700


def test_join_decodes_an_event_once_when_it_closes_the_rollout() -> None:
    """Until then it is bytes, and what decided about it is not computed again."""
    reader = Reader(PIPELINE.build_stages(0)[0])
    reader.feed_rollouts(1, 5, 10)
    while_open = dict(reader.decoded)
    for noun, end in barrier("rollout-00000000", expected_calls=5, expected_events=5):
        reader.feed(noun, end)

    reader.stage.item_done("rollout-00000000/0")

    assert {} == while_open
    assert {1} == set(reader.decoded.values())


def test_join_makes_no_record_of_a_call_that_it_only_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart reads thousands of calls; whose they are is told by their fields."""
    made: list[type] = []
    make = Parsed.make
    monkeypatch.setattr(Parsed, "make", lambda parsed: made.append(parsed.cls) or make(parsed))
    reader = Reader(PIPELINE.build_stages(0)[0])

    reader.feed_rollouts(1, 5, 10)

    assert 16 == reader.num_events
    assert not {ModelCall, EnvironmentEvent}.intersection(made)


def test_join_decodes_a_held_call_once_however_often_it_is_repeated() -> None:
    """What a call says is hashed when a second one comes, and not again."""
    reader = Reader(PIPELINE.build_stages(0)[0])
    one = call("c-1")

    for record in (opened(), one, one, one):
        reader.feed("calls", record)

    assert {CODEC.encode(one): 1} == reader.decoded


def test_ledger_remembers_the_last_done_items_and_every_one_on_its_way() -> None:
    """A worker that runs for weeks does not grow, and what is not in the log yet is never forgotten."""
    items = Ledger("join", mark, lambda event, item, holds: ("late", item), keep=2)
    items.close("leaving", [1], [])
    items.close("old", [1], [])
    for item in ("old", "a", "b"):
        items.done(item)
    while_leaving = [item for item in ("leaving", "old", "a", "b") if items.is_closed(item)]

    items.done("leaving")

    assert ["leaving", "old", "a", "b"] == while_leaving
    assert [False, False, True, True] == [items.is_closed(item) for item in ("leaving", "old", "a", "b")]


def test_ledger_that_keeps_all_forgets_only_what_it_is_told_to() -> None:
    """A stage that reads its output back for longer is told when to forget; what is on its way out stays all the same."""
    items = Ledger("group", mark, lambda event, item, holds: ("late", item), keep=None)
    items.close("leaving", [1], [])
    items.done("done")
    items.done("kept")

    for item in ("leaving", "done", "unknown"):
        items.forget(item)

    assert [True, False, True] == [items.is_closed(item) for item in ("leaving", "done", "kept")]


def test_one_to_one_stage_remembers_the_last_done_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for reward and credit."""
    monkeypatch.setattr(stateless, "KEPT_ITEMS", 2)
    stage = PIPELINE.build_stages(0)[3]

    for item in ("a", "b", "c"):
        stage.item_done(item)

    assert ["b", "c"] == list(stage._done)  # type: ignore[attr-defined]
