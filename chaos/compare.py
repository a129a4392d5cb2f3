"""The ledger of truth against everything that is stored: what is lost, doubled or wrong.

    python -m chaos.compare --ledger FILE      the stores, broker and pipeline are those of the settings

Three sources that know nothing of each other: the ClickHouse tables, the Parquet files that manifests name, and the samples
topic. Group by group, ClickHouse's rows are held against what clients sent and were told (`check_group`); the stores are held
against each other row by row (`check_stores`). Everything must be through the pipeline before: what is still open is lost.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from chaos.check_group import Held, certainties, check_group, held_by, unknown_group
from chaos.check_stores import (
    Rows,
    TopicLook,
    check_manifests,
    missing_rows,
    name_of,
    number_of,
    object_rows,
    samples_topic,
)
from chaos.ledger import LedgerFile
from chaos.problem import Problem, Rules
from rollstream.errors import SettingsError
from rollstream.object_store import open_store
from rollstream.processors.config import PipelineConfig
from rollstream.processors.pipeline import load_pipeline
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import DeadLetter, GroupClose, RolloutStatus
from rollstream.schemas.registry import open_codec
from rollstream.settings import Settings, load_settings
from rollstream.sinks.connect import connect
from rollstream.sinks.stored import PARTS, Evidence, Stored

_GROUPS_AT_ONCE = 100
_UNGROUPED = ("dead_letters", "policy_versions", "consumptions")
_SHOWN = 40
_LEAST = (("rollouts certain", "finishes acknowledged", 0.3), ("groups certain to be full", "groups", 0.1))
"""What must have been certain, as a share of what. Where less was, deadlines decided nearly all, and little was asked for."""


@dataclass(slots=True)
class Verdict:
    """What the comparison found."""

    lost: int = 0
    """Things that were acknowledged, or follow from such, and are not where they must be."""
    doubled: int = 0
    """Things that are there more often than they happened."""
    wrong: int = 0
    """Things whose content is not the truth."""
    twins: int = 0
    """Copies of equal bytes on the samples topic, which restarts may write and every reader drops."""
    too_little: list[str] = field(default_factory=list)
    """What was compared in too small a number to prove anything, in words."""
    counts: dict[str, int] = field(default_factory=dict)
    """What was compared, by name."""
    examples: list[Problem] = field(default_factory=list)
    """The first problems of each kind."""

    @property
    def ok(self) -> bool:
        """Whether nothing is lost, doubled or wrong, and enough was compared to say so."""
        return not (self.lost or self.doubled or self.wrong or self.too_little)

    def add(self, problems: Iterable[Problem]) -> None:
        """Count problems, and keep the first."""
        for problem in problems:
            number = getattr(self, problem.kind) + 1
            setattr(self, problem.kind, number)
            if number <= _SHOWN:
                self.examples.append(problem)

    def demand(self) -> None:
        """Note what was compared too little of."""
        for name, whole, share in _LEAST:
            number, least = self.counts.get(name, 0), max(share * self.counts.get(whole, 0), 1)
            if number < least:
                self.too_little.append(
                    f"{name}: {number} of {self.counts.get(whole, 0)} {whole}, expected at least {least:.0f}; raise the "
                    "pipeline's deadlines, or run longer"
                )

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def rules_of(config: PipelineConfig) -> Rules:
    """What of a pipeline the comparison needs.

    Raises: SettingsError: its group, credit or reward is one of which the comparison does not know what must come out.
    """
    if frozenset(config.group.counts) != frozenset(RolloutStatus):
        counts = [status.value for status in config.group.counts]
        raise _unknown(f"group.counts={counts!r}", "all statuses: each rollout fills a place")
    if config.group.late != "dead_letter":
        raise _unknown(f"group.late={config.group.late!r}", "'dead_letter': a group has one revision")
    credit = {"center": "mean", "scale": "group_std", "ddof": 1, "eps": 1e-6, **config.credit.config}
    if config.credit.method != "grpo" or (credit["center"], credit["scale"]) != ("mean", "group_std"):
        raise _unknown(f"credit={config.credit!r}", "grpo with center mean and scale group_std")
    if set(config.reward.components.values()) != {1.0} or len(config.reward.components) != 1:
        raise _unknown(f"reward={config.reward!r}", "one component that weighs 1")
    return Rules(
        join_deadline_ms=round(config.join.deadline_s * 1000),
        group_deadline_ms=round(config.group.deadline_s * 1000),
        clip=config.reward.clip or (-float("inf"), float("inf")),
        ddof=credit["ddof"],
        eps=credit["eps"],
    )


def _unknown(what: str, expected: str) -> SettingsError:
    return SettingsError(f"cannot compare a run with {what}, expected {expected}; take chaos/pipeline.yaml")


def compare(ledger: Path, settings: Settings, *, pipeline: Path | None = None) -> Verdict:
    """Compare a ledger with everything that is stored.

    Args: settings: name the stores, the broker and the claims. pipeline: None for that of the settings.
    """
    rules = rules_of(load_pipeline(pipeline or settings.processor.pipeline).config)
    codec = open_codec(settings.kafka.registry_url, settings.claims)
    objects = open_store(settings.sink.objects, settings.sink.s3)
    stored = Stored(connect(settings.sink.clickhouse, migrate=False))
    verdict = Verdict()
    verdict.add(check_manifests(objects))
    in_objects = object_rows(objects, settings.kafka.prefix)
    in_topic = samples_topic(settings.kafka, codec)
    in_tables = compare_groups(LedgerFile(ledger), stored, codec, rules, verdict, in_objects)
    missing = {name: rows - in_tables.by_table[name] for name, rows in in_objects.by_table.items()}
    verdict.add(missing_rows(objects, settings.kafka.prefix, missing))
    add_topic(verdict, in_topic, in_tables)
    verdict.counts |= {f"Parquet rows of {name}": len(rows) for name, rows in in_objects.by_table.items()}
    verdict.demand()
    return verdict


def compare_groups(
    ledger: LedgerFile, stored: Stored, codec: Codec, rules: Rules, verdict: Verdict, in_objects: Rows | None
) -> Rows:
    """Hold ClickHouse's rows against the ledger and, where it is given, against Parquet. Returns: the rows."""
    rows = Rows()
    for table in _UNGROUPED:
        _take(rows, table, stored.rows(table, "1", {}), in_objects, verdict)
    counts: Counter[str] = Counter()
    held = held_by(_counted(stored.dead_letters(), counts), codec)
    group_ids = sorted({*ledger.group_ids(), *stored.group_ids()})
    for at in range(0, len(group_ids), _GROUPS_AT_ONCE):
        batch = group_ids[at : at + _GROUPS_AT_ONCE]
        evidence = {one.group_id: one for one in stored.load(batch)}
        for one in evidence.values():
            for table, part in PARTS.items():
                _take(rows, table, getattr(one, part), in_objects, verdict)
        check_batch(ledger, evidence, held, rules, verdict, counts)
    verdict.counts |= dict(counts)
    return rows


def _counted(letters: Iterable[DeadLetter], counts: Counter[str]) -> Iterator[DeadLetter]:
    for letter in letters:
        counts["dead letters"] += 1
        yield letter


def check_batch(
    ledger: LedgerFile,
    evidence: Mapping[str, Evidence],
    held: Held,
    rules: Rules,
    verdict: Verdict,
    counts: Counter[str],
) -> None:
    """Check some groups, and count what was compared. Args: evidence: their rows by group id."""
    known = set(ledger.group_ids())
    verdict.add(unknown_group(group_id) for group_id in sorted(evidence.keys() - known))
    for truth in ledger.groups(sorted(evidence.keys() & known)):
        one = evidence[truth.group_id]
        verdict.add(check_group(truth, one, held, rules))
        certain, is_full = certainties(truth, rules)
        counts["rollouts certain"] += certain
        counts["groups certain to be full"] += is_full
        counts["groups"] += 1
        counts["groups full"] += any(group.closed_by is GroupClose.FULL for group in one.groups)
        counts["rollouts"] += len(truth.members)
        for attempt in truth.attempts.values():
            counts["calls requested"] += len(attempt.calls)
            counts["calls acknowledged"] += sum(line["ok"] for line in attempt.calls)
            counts["events acknowledged"] += len({line["e"] for line in attempt.events if line["ok"]})
            counts["finishes acknowledged"] += attempt.finished is not None
        counts["calls stored"] += len(one.calls)
        counts["samples stored"] += len(one.samples)
        counts["calls in samples"] += sum(len(sample.segments) for sample in one.samples)
        counts["calls masked"] += sum(len(built.masked) for built in one.built)


def add_topic(verdict: Verdict, look: TopicLook, in_tables: Rows) -> None:
    """Hold the samples topic against ClickHouse's tables."""
    verdict.twins = look.rows.twins
    verdict.add(look.problems)
    for table in ("samples", "built_groups"):
        topic, stored = look.rows.by_table[table], in_tables.by_table[table]
        verdict.counts[f"{table} on the topic"] = len(topic)
        verdict.add(Problem("lost", table, f"row {number:x} is on the topic only") for number in topic - stored)
        if look.is_whole:
            verdict.add(
                Problem("wrong", table, f"row {number:x} is in no record of the topic") for number in stored - topic
            )


def _take(rows: Rows, table: str, found: Iterable[Any], in_objects: Rows | None, verdict: Verdict) -> None:
    for row in found:
        if not rows.add(table, row):
            verdict.add([Problem("doubled", name_of(row), f"is in table {table} twice with equal content")])
        if in_objects is not None and number_of(row) not in in_objects.by_table[table]:
            verdict.add([Problem("lost", name_of(row), f"is in table {table}, and not in Parquet")])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m chaos.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ledger", type=Path, required=True, help="what chaos.load wrote")
    options = parser.parse_args(arguments)
    verdict = compare(options.ledger, load_settings(None))
    print(orjson.dumps(verdict.as_dict(), option=orjson.OPT_INDENT_2).decode())
    sys.exit(0 if verdict.ok else 1)


if __name__ == "__main__":
    main()
