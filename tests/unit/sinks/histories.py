"""What a store would hold after the real stages have run over a history, put together without a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollstream.processors.pipeline import Pipeline
from rollstream.schemas.records import DeadLetter, Record
from rollstream.sinks.audit import AuditReport, audit_evidence
from rollstream.sinks.check_accounted import quarantine
from rollstream.sinks.stored import PARTS, Evidence
from rollstream.sinks.tables import is_stored, table_of
from tests.unit.processors.simulation import CODEC, Simulation, default_pipeline

Entry = tuple[str, Record]
"""Topic noun and record."""


def play(
    entries: Iterable[Entry], *ticks_ms: int, seed: int = 0, group: Mapping[str, object] | None = None
) -> Simulation:
    """Run all stages over a history until nothing is left to do, then let time pass.

    Args: group: what the pipeline says of the group stage besides its defaults.
    """
    pipeline = default_pipeline()
    if group:
        config = pipeline.config
        pipeline = Pipeline(config.model_copy(update={"group": config.group.model_copy(update=dict(group))}))
    simulation = Simulation(pipeline, seed)
    for noun, record in entries:
        simulation.append(noun, record)
        simulation.run()
    for now_ms in (0, *ticks_ms, *ticks_ms[-1:]):  # what a tick decides is told at the next
        simulation.tick(now_ms)
    return simulation


def dead_letters(simulation: Simulation) -> list[DeadLetter]:
    """The dead letters as the shell writes them."""
    return [
        DeadLetter(
            dead_letter_id=f"{position.noun}/{position.offset}",
            boundary=reject.boundary,
            reason=reject.reason,
            message=reject.message,
            topic=position.noun,
            partition=position.partition,
            offset=position.offset,
            value=reject.event.value,
            at_ms=reject.event.time_ms,
            rollout_id=getattr(reject.event.record, "rollout_id", None),
            call_id=getattr(reject.event.record, "call_id", None),
        )
        for position, reject in simulation.dead.items()
    ]


def stored(simulation: Simulation) -> list[Evidence]:
    """The rows of every group; equal bytes are one row."""
    found: dict[str, Evidence] = {}
    seen: set[bytes] = set()
    for noun, events in simulation.logs.items():
        for event in events:
            if event.value in seen or not is_stored(event.record, f"rollstream.{noun}.v1"):
                continue
            seen.add(event.value)
            table = table_of(type(event.record))
            for row in table.rows(event.record):
                evidence = found.setdefault(row.group_id, Evidence(row.group_id))
                getattr(evidence, PARTS[table.name]).append(row)
    return list(found.values())


def audited(
    simulation: Simulation,
    groups: list[Evidence] | None = None,
    letters: list[DeadLetter] | None = None,
    *,
    closed: bool = False,
) -> AuditReport:
    """The audit over what the simulation has written. Args: groups, letters: other ones than these."""
    return audit_evidence(
        iter(stored(simulation) if groups is None else groups),
        held=quarantine(dead_letters(simulation) if letters is None else letters, CODEC),
        bounds={},
        unknown_samples=[],
        counts={},
        closed=closed,
    )
