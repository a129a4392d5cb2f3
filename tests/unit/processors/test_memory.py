"""What stages remember of what is done, as long as a partition stays where it is."""

from __future__ import annotations

import pytest

from rollstream.processors import ledger, stateless
from rollstream.processors.content import mark
from rollstream.processors.ledger import Ledger
from rollstream.processors.pipeline import Pipeline
from tests.unit.processors.simulation import default_pipeline

PIPELINE: Pipeline = default_pipeline()


def test_ledger_remembers_the_last_done_items_and_every_one_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs for weeks does not grow, and what is not in the log yet is never forgotten."""
    monkeypatch.setattr(ledger, "KEPT_ITEMS", 2)
    items = Ledger("join", mark, lambda event, item, holds: ("late", item))
    items.close("leaving", [1], [])
    items.close("old", [1], [])
    for item in ("old", "a", "b"):
        items.done(item)
    while_leaving = [item for item in ("leaving", "old", "a", "b") if items.is_closed(item)]

    items.done("leaving")

    assert ["leaving", "old", "a", "b"] == while_leaving
    assert [False, False, True, True] == [items.is_closed(item) for item in ("leaving", "old", "a", "b")]


def test_one_to_one_stage_remembers_the_last_done_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for reward and credit."""
    monkeypatch.setattr(stateless, "KEPT_ITEMS", 2)
    stage = PIPELINE.build_stages(0)[3]

    for item in ("a", "b", "c"):
        stage.item_done(item)

    assert ["b", "c"] == list(stage._done)  # type: ignore[attr-defined]
