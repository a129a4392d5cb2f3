"""The four questions that stored data must always answer, asked of every group; `rollstream audit`.

1. accounted: every call that was started is in a sample, masked with a reason, in a dead letter, or still open.
2. token_traceable: every sampled token is the call's own, under its own prefix, exactly once.
3. rollout_traceable: every sample leads to its rollout, group, scores, rewards and credits, and all digests hold.
4. score_reviewable: rewards follow from raw scores, advantages from rewards.
5. packing: cutting and merging calls changed no rollout's weight.

And two of the stores' own: identity (one content an identity) and consumed (what was trained on is stored). The checks are
pure functions over the rows of one group (`check_*.py`); this file feeds them. Stored data may lag behind the log: audit what
the sinks have caught up with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstream.schemas.codec import Codec
from rollstream.sinks.check_accounted import IDENTITY, Quarantine, check_accounted, check_identity, quarantine
from rollstream.sinks.check_lineage import LINEAGE, check_lineage, check_records
from rollstream.sinks.check_placed import ACCOUNTED
from rollstream.sinks.check_rewards import REWARDS, Bounds, check_advantages, check_rewards
from rollstream.sinks.check_tokens import TOKENS, check_tokens
from rollstream.sinks.check_weights import WEIGHTS, check_weights
from rollstream.sinks.stored import Evidence, Stored
from rollstream.sinks.view import Finding, View

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

CONSUMED = "consumed"
CHECKS = (ACCOUNTED, TOKENS, LINEAGE, REWARDS, WEIGHTS, IDENTITY, CONSUMED)
"""Names of the checks, in the order of the report."""

PLACES = ("in samples", "masked", "quarantined", "open", "unaccounted")
"""Where a call may be; the report counts each call once, in the first that fits."""

SHOWN = 20


@dataclass(slots=True)
class AuditReport:
    """What an audit found."""

    counts: dict[str, int]
    """Stored things by name: groups, calls, samples, sampled tokens, calls by place, dead letters, ..."""
    findings: dict[str, list[Finding]] = field(default_factory=lambda: {name: [] for name in CHECKS})
    """What does not hold, by check."""
    open_calls: dict[str, str] = field(default_factory=dict)
    """Calls that wait for something, with what they wait for: `rollout`, `group` or `samples`."""

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return not any(self.findings.values())

    def as_dict(self) -> dict[str, Any]:
        """As JSON values; of each check the first findings."""
        return {
            "ok": self.ok,
            "counts": self.counts,
            "checks": {
                name: {
                    "ok": not found,
                    "failures": len(found),
                    "first": [{"about": finding.about, "message": finding.message} for finding in found[:SHOWN]],
                }
                for name, found in self.findings.items()
            },
            "open": {
                "calls": len(self.open_calls),
                "first": dict(sorted(self.open_calls.items())[:SHOWN]),
            },
        }

    def __str__(self) -> str:
        lines = [f"{name}: {count}" for name, count in self.counts.items()]
        if self.open_calls:
            lines.append(
                f"open calls: {len(self.open_calls)} (waiting for {', '.join(sorted(set(self.open_calls.values())))})"
            )
        for name, found in self.findings.items():
            lines.append(f"{'ok  ' if not found else 'FAIL'} {name}" + (f": {len(found)}" if found else ""))
            lines += [f"       {finding.about}: {finding.message}" for finding in found[:SHOWN]]
        return "\n".join(lines)


def audit(client: Client, *, closed: bool = False, codec: Codec | None = None) -> AuditReport:
    """Check everything that is stored.

    Args:
        client: from `connect`.
        codec: reads the bytes in dead letters; needed where a registry is used.
        closed: nothing should be open any more: a call that waits for something is a failure.
    Raises: AuditError: the store cannot be read.
    """
    stored = Stored(client)
    return audit_evidence(
        (evidence for batch in stored.batches() for evidence in batch),
        held=quarantine(stored.dead_letters(), codec or Codec()),
        bounds=_bounds(stored),
        unknown_samples=_unknown_samples(stored),
        counts=_counts(stored),
        closed=closed,
    )


def audit_evidence(
    groups: Iterator[Evidence],
    *,
    held: Quarantine,
    bounds: Bounds,
    unknown_samples: list[tuple[str, str]],
    counts: dict[str, int],
    closed: bool = False,
) -> AuditReport:
    """The audit without a store.

    Args:
        groups: rows, group by group.
        held: what dead letters account for.
        bounds: lowest and highest reward by digest of the reward configuration.
        unknown_samples: consumption and sample id of samples that were trained on and are not stored.
        counts: goes into the report.
        closed: open calls are failures.
    """
    report = AuditReport(dict(counts))
    places: Counter[str] = Counter()
    constants: dict[str, float] = {}
    findings: list[Finding] = []
    for evidence in groups:
        view = View(evidence)
        accounts = check_accounted(view, held)
        findings += accounts.findings
        places += accounts.places
        report.open_calls |= accounts.still_open
        findings += check_identity(view, held)
        findings += check_records(view)
        findings += check_rewards(view, bounds)
        for built in evidence.built:
            findings += check_tokens(view, built)
            findings += check_lineage(view, built)
            findings += check_advantages(view, built)
            findings += check_weights(view, built, constants)
        findings += _unnamed(view)
    for consumption_id, sample_id in unknown_samples:
        findings.append(Finding(CONSUMED, consumption_id, f"trained on sample {sample_id!r}, which is not stored"))
    if closed:
        for call_id, waits in report.open_calls.items():
            findings.append(Finding(ACCOUNTED, call_id, f"is open: it waits for its {waits}"))
    report.counts |= {f"calls {place}": places[place] for place in PLACES}
    for finding in findings:
        report.findings[finding.check].append(finding)
    return report


def _unnamed(view: View) -> Iterator[Finding]:
    """Samples that no group record names, in a group that has one of their pipeline."""
    named = {sample_id for built in view.evidence.built for sample_id in built.sample_ids}
    pipelines = {(built.group_revision, built.pipeline_digest) for built in view.evidence.built}
    for sample in view.evidence.samples:
        if sample.sample_id not in named and (sample.group_revision, sample.pipeline_digest) in pipelines:
            yield Finding(
                LINEAGE, sample.sample_id, f"is stored, and the record of group {view.group_id!r} does not name it"
            )


def _bounds(stored: Stored) -> Bounds:
    rows = stored.query(
        "SELECT stage_config_digest, min(value), max(value) FROM rewards FINAL WHERE value IS NOT NULL "
        "GROUP BY stage_config_digest"
    )
    return {digest: (low, high) for digest, low, high in rows}


def _unknown_samples(stored: Stored) -> list[tuple[str, str]]:
    rows = stored.query(
        "SELECT consumption_id, id FROM (SELECT consumption_id, arrayJoin(sample_ids) AS id FROM consumptions FINAL) "
        "WHERE id NOT IN (SELECT sample_id FROM samples) ORDER BY ALL"
    )
    return [(str(consumption), str(sample)) for consumption, sample in rows]


def _counts(stored: Stored) -> dict[str, int]:
    queries = {
        "calls started": (
            "SELECT uniqExact(call_id) FROM (SELECT call_id FROM call_starts UNION ALL SELECT call_id FROM model_calls)"
        ),
        "calls with an outcome": "SELECT uniqExact(call_id) FROM model_calls",
        "rollouts": "SELECT uniqExact(rollout_id, attempt) FROM rollouts",
        "groups": "SELECT uniqExact(group_id) FROM groups",
        "groups built": "SELECT uniqExact(group_id) FROM built_groups",
        "samples": "SELECT count() FROM samples FINAL",
        "sampled tokens": "SELECT sum(arraySum(mask)) FROM samples FINAL",
        "dead letters": "SELECT count() FROM dead_letters FINAL",
        "samples trained on": "SELECT uniqExact(id) FROM (SELECT arrayJoin(sample_ids) AS id FROM consumptions)",
    }
    return {name: int(stored.query(sql)[0][0]) for name, sql in queries.items()}
