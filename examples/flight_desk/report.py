"""What the demo shows: the live table, the plot, `report.json`, the audit and one token explained and scored again.

Every number is read from what was stored in ClickHouse; only the live table reads the processes' logs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollstream.sinks.audit import PLACES, AuditReport, audit
from rollstream.sinks.connect import connect
from rollstream.sinks.explain import Explanation, explain

matplotlib.use("Agg")
transformers_logging.disable_progress_bar()

GOAL_START = 0.40
"""Success before learning must be under this."""
GOAL_END = 0.80
"""Success of the last versions must be over this."""
LAST_VERSIONS = 3
"""How many versions count as the last ones."""
RESCORE_TOLERANCE = 1e-3
"""How far a recorded log-probability may be from the one computed again."""

SQL = {
    "success by policy version": """
SELECT version_min AS version, count() AS rollouts, avg(JSONExtractFloat(outcome, 'reward')) AS success
FROM rollouts FINAL WHERE version_min IS NOT NULL GROUP BY version ORDER BY version""",
    "success by version and number of sold-out rows": """
SELECT intDiv(version_min, 5) * 5 AS from_version, JSONExtractUInt(outcome, 'depth') AS sold_out, count() AS rollouts,
       avg(JSONExtractFloat(outcome, 'reward')) AS success
FROM rollouts FINAL WHERE version_min IS NOT NULL GROUP BY from_version, sold_out ORDER BY from_version, sold_out""",
    "staleness of what was trained on": """
SELECT c.version_before - s.version_min AS versions_old, count() AS samples
FROM (SELECT version_before, arrayJoin(sample_ids) AS sample_id FROM consumptions FINAL) AS c
JOIN (SELECT sample_id, version_min FROM samples FINAL) AS s USING sample_id
GROUP BY versions_old ORDER BY versions_old""",
}


@dataclass(frozen=True, slots=True)
class Rescored:
    """One token of the last batch: what was recorded, and what its policy version says about it now."""

    sample_id: str
    position: int
    """The token's position in the sample = length of its true prefix."""
    version: int
    recorded: float
    computed: float

    @property
    def difference(self) -> float:
        """Absolute difference of the two log-probabilities."""
        return abs(self.recorded - self.computed)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the demo measured."""

    seed: int
    shuffled: bool
    seconds: Mapping[str, float]
    success_by_version: Mapping[int, Mapping[str, float]]
    success_by_depth: Sequence[Mapping[str, float]]
    success_start: float
    success_end: float
    calls: Mapping[str, int]
    groups: Mapping[str, int]
    staleness: Mapping[int, int]
    audit: AuditReport
    rescored: Rescored
    explained: Explanation

    @classmethod
    def of(cls, out: Path, clickhouse: str, *, seed: int, shuffled: bool, seconds: Mapping[str, float]) -> Self:
        """Read the report from the stored data."""
        client = connect(clickhouse)
        versions = {
            int(version): {"rollouts": int(rollouts), "success": round(float(success), 4)}
            for version, rollouts, success in client.query(SQL["success by policy version"]).result_rows
        }
        depths = [
            dict(zip(("from_version", "sold_out", "rollouts", "success"), row, strict=True))
            for row in client.query(SQL["success by version and number of sold-out rows"]).result_rows
        ]
        staleness = {int(age): int(n) for age, n in client.query(SQL["staleness of what was trained on"]).result_rows}
        last = sorted(versions)[-LAST_VERSIONS:]
        rescored = _rescore(client, out)
        report = audit(client, closed=True)
        return cls(
            seed=seed,
            shuffled=shuffled,
            seconds={name: round(value, 1) for name, value in seconds.items()},
            success_by_version=versions,
            success_by_depth=depths,
            success_start=_mean_success([versions[min(versions)]]),
            success_end=_mean_success([versions[version] for version in last]),
            calls=_calls(report.counts),
            groups=_groups(client),
            staleness=staleness,
            audit=report,
            rescored=rescored,
            explained=explain(client, rescored.sample_id, rescored.position),
        )

    @property
    def is_learned(self) -> bool:
        """Whether success rose as the demo promises."""
        return self.success_start < GOAL_START and self.success_end > GOAL_END

    @property
    def is_good(self) -> bool:
        """Whether everything is as promised; a control run must not learn."""
        is_exact = self.rescored.difference <= RESCORE_TOLERANCE
        return self.audit.ok and is_exact and self.is_learned != self.shuffled

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `report.json`."""
        return {
            "seed": self.seed,
            "rewards_shuffled": self.shuffled,
            "seconds": dict(self.seconds),
            "success": {"start": self.success_start, "end": self.success_end, "learned": self.is_learned},
            "success_by_policy_version": {
                str(version): dict(row) for version, row in self.success_by_version.items()
            },
            "success_by_sold_out_rows": [dict(row) for row in self.success_by_depth],
            "calls": dict(self.calls),
            "groups": dict(self.groups),
            "staleness_versions": {str(age): n for age, n in self.staleness.items()},
            "audit": self.audit.as_dict(),
            "rescored_token": {**asdict(self.rescored), "difference": self.rescored.difference},
        }

    def _versions(self, every: int = 4) -> Table:
        """Success of every fourth version and the last, as stored."""
        table = Table("policy version", "rollouts", "success", title="Success by policy version, from ClickHouse")
        for version, row in self.success_by_version.items():
            if version % every == 0 or version == max(self.success_by_version):
                table.add_row(str(version), f"{row['rollouts']:.0f}", f"{row['success']:.0%}")
        return table

    def show(self, console: Console, out: Path) -> None:
        """Print the results, and how to look further."""
        console.print(self._versions())
        console.print(f"\nSuccess {self.success_start:.0%} → {self.success_end:.0%} in {self.seconds['learn']:.0f} s")
        console.print(f"\n{self.audit}\n")
        console.print(f"{self.explained}\n", highlight=False)
        console.print(
            f"Scored again with policy version {self.rescored.version}: {self.rescored.computed:.6f}, recorded "
            f"{self.rescored.recorded:.6f}, difference {self.rescored.difference:.1e}"
        )
        shown = Path(os.path.relpath(out))
        command = os.path.relpath(Path(sys.executable).with_name("rollstream"))
        console.print(
            f"\nLeft to look at in {shown}: report.json, success.png, clickhouse/, objects/, weights/, logs/"
        )
        console.print(f"  {command} audit --store chdb://{shown}/clickhouse")
        token = f"{self.rescored.sample_id}:{self.rescored.position}"
        console.print(f"  {command} explain {token} --store chdb://{shown}/clickhouse", soft_wrap=True)
        console.print(f'  {command} sql "..." --store chdb://{shown}/clickhouse     # for instance:')
        for name, sql in SQL.items():
            console.print(f"\n-- {name}{sql};", highlight=False, soft_wrap=True)


def live_table(played: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]], rows: int = 16) -> Table:
    """The table shown while the demo runs: success by the version that was served when a rollout began."""
    seconds = max((line["at_s"] for line in played), default=0.0)
    calls = sum(line["turns"] for line in played)
    rate = calls / seconds if seconds else 0.0
    table = Table(
        title=f"{len(played)} rollouts, {calls} calls, {rate:.0f} calls/s, {len(trained)} steps, {seconds:.0f} s"
    )
    for column in ("policy version", "rollouts", "success", "", "staleness", "entropy"):
        table.add_column(column, justify="left" if not column else "right")
    steps = {line["version"]: line for line in trained}
    for version in sorted({line["version"] for line in played})[-rows:]:
        rewards = [line["reward"] for line in played if line["version"] == version]
        success = sum(rewards) / len(rewards)
        step = steps.get(version, {})
        table.add_row(
            str(version),
            str(len(rewards)),
            f"{success:.0%}",
            "█" * round(12 * success),
            f"{step['staleness']:.1f}" if step else "",
            f"{step['entropy']:.2f}" if step else "",
        )
    return table


def draw(report: Report, file: Path) -> None:
    """Plot success by policy version."""
    from matplotlib import pyplot

    versions = sorted(report.success_by_version)
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(versions, [report.success_by_version[v]["success"] for v in versions], marker=".", label="all desks")
    for sold_out in sorted({row["sold_out"] for row in report.success_by_depth}):
        rows = [row for row in report.success_by_depth if row["sold_out"] == sold_out]
        label = f"{sold_out:.0f} sold-out rows to pass (mean of 5 versions)"
        axes.plot([r["from_version"] + 2 for r in rows], [r["success"] for r in rows], alpha=0.4, label=label)
    axes.axhline(GOAL_END, color="grey", linewidth=0.5)
    axes.set(xlabel="policy version", ylabel="success", ylim=(0, 1), title=f"Flight desk, seed {report.seed}")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def write_report(report: Report, file: Path) -> None:
    """Write `report.json`."""
    file.write_text(json.dumps(report.as_dict(), indent=2) + "\n", "utf-8")


def _rescore(client: Any, out: Path) -> Rescored:
    """Score one sampled token of the last batch again, under its recorded prefix, with the weights of its version."""
    row = client.query("""
        SELECT sample_id, ids, mask, logprobs, versions, temperature FROM samples FINAL
        WHERE sample_id IN (SELECT arrayJoin(sample_ids) FROM consumptions FINAL
                            WHERE step = (SELECT max(step) FROM consumptions WHERE notEmpty(sample_ids)))
        ORDER BY arrayExists(advantage -> advantage != 0, advantages) DESC, sample_id LIMIT 1""").result_rows
    if not row:
        raise SystemExit("no step trained on any sample; see train.jsonl")
    sample_id, ids, mask, logprobs, versions, temperature = row[0]
    sampled = [position for position, is_sampled in enumerate(mask) if is_sampled]
    # The least certain token: a nearly certain one would agree with any model.
    position = min(sampled, key=lambda at: logprobs[at])
    version = next(span["version"] for span in versions if span["start"] <= position < span["end"])
    model = AutoModelForCausalLM.from_pretrained(out / "weights" / str(version) if version else out / "model")
    with torch.no_grad():
        logits = model(torch.tensor([list(ids[:position])])).logits[0, -1].float()
    computed = float(torch.log_softmax(logits / temperature, -1)[ids[position]])
    return Rescored(sample_id, position, int(version), float(logprobs[position]), computed)


def _calls(counts: Mapping[str, int]) -> dict[str, int]:
    """Where the started calls are, each in one place, as the audit found them."""
    return {
        "started": counts["calls started"],
        **{place.replace(" ", "_"): counts[f"calls {place}"] for place in PLACES},
    }


def _groups(client: Any) -> dict[str, int]:
    row = client.query("""
        SELECT count(), countIf(closed_by = 'full'), countIf(closed_by = 'timeout'), countIf(closed_by = 'partial')
        FROM groups FINAL""").result_rows[0]
    spread = client.query("SELECT countIf(has_spread) FROM built_groups FINAL").result_rows[0][0]
    return {"closed": row[0], "full": row[1], "timeout": row[2], "partial": row[3], "with_spread": spread}


def _mean_success(rows: Sequence[Mapping[str, float]]) -> float:
    rollouts = sum(row["rollouts"] for row in rows)
    return round(sum(row["success"] * row["rollouts"] for row in rows) / rollouts, 4)
