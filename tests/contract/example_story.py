"""The story behind `schemas/examples/`: three groups of the flight desk, told as records.

The source records are written out here; everything derived comes from the real stages with the pipeline that ships. So the
examples are what the system writes, digest by digest. After a change of a record or of the pipeline, rewrite them:
`python -m tests.contract.example_story`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.schemas import records as r
from rollstream.schemas.codec import Codec, encode_body, record_name
from rollstream.schemas.identity import digest_bytes, digest_json
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.readable import to_readable
from rollstream.schemas.records.claims import ClaimCheck
from rollstream.schemas.topics import TERMINAL_TOPICS, topic_of
from rollstream.schemas.types import Json, pack_floats, pack_ids
from tests.contract.checkout import ROOT
from tests.memory_claims import MemoryClaims
from tests.unit.processors.simulation import Simulation, default_pipeline

FOLDER = ROOT / "schemas" / "examples"
START_MS = 1_764_000_000_000
PROMPT = [1, 872, 198, 46, 81, 4070, 311, 88, 2, 1, 77091, 198]
SEARCH = [151, 60, 1836, 2]
ORDER = [151, 60, 511, 220, 16, 2]
GIVE_UP = [2822, 11115, 2]
OBSERVED = [198, 1, 82, 21, 33, 2, 1, 77091, 198]
ENCODING = r.Encoding(
    digest_json("tokenizer"), digest_json("template"), digest_json({"tools": "flight_desk"}), "hermes"
)
WEIGHTS = "s3://rollstream/policies/default/4"


@dataclass
class Teller:
    """Writes one rollout's source records, in order."""

    rollout_id: str
    group: int
    at_ms: int
    records: list[r.Record] = field(default_factory=list)
    bases: dict[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    @property
    def _ids(self) -> dict[str, Any]:
        return {"rollout_id": self.rollout_id, "attempt": 0, "group_id": self.group_id}

    @property
    def group_id(self) -> str:
        return f"g-flight-{self.group}"

    def open(self) -> None:
        task = Json('{"text":"Osaka to Wuhan: book the cheapest flight before 09:00"}')
        task_id = f"flight-{self.group}"
        self.records.append(
            r.RolloutOpened(**self._ids, group_size=2, task_id=task_id, opened_at_ms=self.at_ms, task=task)
        )

    def call(self, prompt: Sequence[int], output: list[int], logprobs: list[float], **changes: Any) -> list[int]:
        """Write intent and outcome of a call. Returns: its prompt and output, the start of the next prompt."""
        index = len(self.bases)
        whole = np.array(prompt, np.uint32)
        delta = encode_prompt(whole, self.bases)
        self.at_ms += 20
        common = {
            "call_id": f"{self.rollout_id}-c{index}",
            **self._ids,
            "call_index": index,
            "started_at_ms": self.at_ms,
        }
        common["request_digest"] = digest_json(self.rollout_id, index, "request")
        sampling = r.SamplingParams(1.0, 1.0, -1, 512)
        self.records.append(
            r.CallStarted(
                **common,
                prompt_length_tokens=len(whole),
                prompt_digest=delta.digest,
                protocol="openai-chat",
                prompt_suffix=delta.suffix,
                prompt_base_call_id=delta.base_call_id,
                prompt_base_len=delta.base_len,
                sampling=sampling.as_json(),
            )
        )
        outcome = r.ModelCall(
            **common,
            protocol="openai-chat",
            adapter_version="1",
            model_requested="policy",
            model_served="policy",
            engine="vllm",
            engine_version="0.32.0",
            encoding=ENCODING,
            sampling=sampling,
            logprob_semantics=r.LogprobSemantics.PROCESSED,
            prompt=delta,
            output_ids=pack_ids(output),
            output_logprobs=pack_floats(logprobs),
            version_spans=(r.VersionSpan(0, len(output), 3),),
            policy="default",
            finish_reason="stop",
            outcome=r.Outcome.COMPLETED,
            delivered=r.Delivery.UNKNOWN,
            trainable=True,
            defects=(),
            finished_at_ms=self.at_ms + 180,
            first_token_at_ms=self.at_ms + 40,
            message=Json('{"content":"...","role":"assistant"}'),
            harness="OpenAI/Python 3.57.0",
        )
        self.records.append(replace(outcome, **changes))
        self.bases[outcome.call_id] = np.concatenate([whole, np.array(output, np.uint32)])
        self.at_ms += 200
        return [*prompt, *output]

    def event(self, kind: r.EventKind, content: str, **more: Any) -> None:
        count = sum(isinstance(record, r.EnvironmentEvent) for record in self.records)
        last = f"{self.rollout_id}-c{len(self.bases) - 1}"
        event_id = f"{self.rollout_id}-e{count}"
        at = {"kind": kind, "content": Json(content), "at_ms": self.at_ms, "call_id": last}
        self.records.append(r.EnvironmentEvent(event_id=event_id, **self._ids, **at, **more))

    def finish(self, status: r.RolloutStatus, outcome: str) -> None:
        self.at_ms += 30
        self.records.append(
            r.Terminal(
                **self._ids,
                group_size=2,
                task_id=f"flight-{self.group}",
                status=status,
                finished_at_ms=self.at_ms,
                outcome=Json(outcome),
                expected_events=sum(isinstance(record, r.EnvironmentEvent) for record in self.records),
            )
        )


def _books(teller: Teller, outcome: str = '{"reward":1.0}') -> Teller:
    """A rollout that searches, orders, and succeeds."""
    teller.open()
    ids = teller.call(PROMPT, SEARCH, [-0.125, -0.5, -0.0625, -0.015625])
    teller.event(r.EventKind.TOOL_RESULT, '{"name":"search","text":"6 flights"}', is_executable=True)
    teller.call([*ids, *OBSERVED], ORDER, [-0.25, -0.03125, -1.5, -0.125, -0.75, -0.0625])
    teller.event(r.EventKind.REWARD, "{}", reward=0.25, state_key=digest_json("desk"))
    teller.finish(r.RolloutStatus.SUCCEEDED, outcome)
    return teller


def _gives_up(teller: Teller) -> Teller:
    """A rollout with a call that a weight update aborts, then an answer that gives up and is only half delivered."""
    teller.open()
    ids = teller.call(PROMPT, SEARCH, [-0.25, -0.5, -0.0625, -0.03125])
    aborted = {
        "outcome": r.Outcome.ABORTED,
        "finish_reason": "abort",
        "trainable": False,
        "defects": ("logprob_missing", "not_completed"),
        "version_spans": (r.VersionSpan(0, 2, 3), r.VersionSpan(2, 3, 4)),
        "message": Json("{}"),
        "error": "the engine aborted the request for a weight update",
    }
    teller.call([*ids, *OBSERVED], GIVE_UP, [-2.25, float("nan"), -0.125], **aborted)
    teller.call([*ids, *OBSERVED], GIVE_UP, [-2.0, -0.5, -0.125], version_spans=(r.VersionSpan(0, 3, 4),))
    teller.finish(r.RolloutStatus.FAILED, '{"reward":0.0}')
    return teller


def story() -> dict[str, list[r.Record | ClaimCheck]]:
    """Every topic of the story with its records: sources as told, the rest as the stages make it."""
    tellers = [
        _books(Teller("r-81f0", 17, START_MS)),
        _gives_up(Teller("r-9c2e", 17, START_MS + 35)),
        _books(Teller("r-a003", 18, START_MS + 60)),
        _books(Teller("r-b771", 18, START_MS + 90), outcome='{"note":"no reward was reported"}'),
        _books(Teller("r-c415", 19, START_MS + 110)),
    ]
    simulation = Simulation(default_pipeline(), seed=0)
    for teller in tellers:
        for record in teller.records:
            for noun in TERMINAL_TOPICS if isinstance(record, r.Terminal) else (topic_of(type(record)).noun,):
                simulation.append(noun, record)
    simulation.run()
    simulation.tick(START_MS + 3_600_000)
    assert simulation.dead == {}
    told: dict[str, list[Any]] = {noun: simulation.records(noun) for noun in simulation.logs}
    told["rollouts"].append(_by_claim(told["rollouts"][0]))
    told["scores"] = [_timeless(record) for record in told["scores"]]
    samples = [record for record in told["samples"] if isinstance(record, r.Sample)]
    told["calls"].append(
        r.CallDelivery(
            call_id="r-9c2e-c2",
            rollout_id="r-9c2e",
            attempt=0,
            group_id="g-flight-17",
            delivered=r.Delivery.PARTIAL,
            reason="client_disconnected",
            at_ms=START_MS + 700,
        )
    )
    told["policies"] = [r.PolicyVersion("default", 4, WEIGHTS, START_MS + 9_000, digest_json("weights"), 3, 3)]
    told["consumptions"] = [
        r.Consumption(
            consumption_id=digest_json("flight-desk", 3),
            trainer="flight-desk",
            step=3,
            policy="default",
            version_before=3,
            version_after=4,
            sample_ids=tuple(sample.sample_id for sample in samples if sample.group_id == "g-flight-17"),
            group_ids=("g-flight-17",),
            skipped=(r.SkippedGroup("g-flight-16", "stale"),),
            at_ms=START_MS + 8_700,
            checkpoint=WEIGHTS,
        )
    ]
    told["dead-letters"] = [
        r.DeadLetter(
            dead_letter_id=digest_json("rollstream.calls.v1", 4, 918, "decode", "unknown_schema"),
            boundary="decode",
            reason="unknown_schema",
            message="cannot decode: schema fingerprint 0707070707070707 is not known here; the writer is newer or foreign, "
            "update rollstream where this ran",
            topic="rollstream.calls.v1",
            partition=4,
            offset=918,
            value=b"\xc3\x01" + b"\x07" * 8 + b"cut",
            at_ms=START_MS + 50,
            key=b"g-flight-17",
        )
    ]
    return told


def _by_claim(record: r.Record) -> ClaimCheck:
    """What would stand in the topic if the record were larger than `claims.inline_bytes`."""
    codec = Codec(claims=MemoryClaims(), inline_bytes=0)
    check = codec.claim_check(codec.encode(record))
    assert check is not None
    return check


def _timeless(record: r.Record) -> r.Record:
    """Scores without their latencies, the one thing that differs between two runs."""
    assert isinstance(record, r.GroupScores)
    return replace(record, scores=tuple(replace(score, latency_ms=0) for score in record.scores))


PASSING = {
    "calls": {
        "rollout_opened": ("RolloutOpened", 0),
        "call_started": ("CallStarted", 0),
        "first_call_whole_prompt": ("ModelCall", 0),
        "second_call_prompt_delta": ("ModelCall", 1),
        "aborted_call_not_trainable": ("ModelCall", 3),
        "delivery_partial": ("CallDelivery", 0),
        "barrier": ("Terminal", 0),
    },
    "environment": {
        "tool_result": ("EnvironmentEvent", 0),
        "call_reward": ("EnvironmentEvent", 1),
        "barrier": ("Terminal", 0),
    },
    "terminals": {"succeeded": ("Terminal", 0), "failed": ("Terminal", 1)},
    "rollouts": {
        "succeeded": ("Rollout", "r-81f0"),
        "with_aborted_call": ("Rollout", "r-9c2e"),
        "by_claim": ("ClaimCheck", 0),
    },
    "groups": {"full": ("Group", "g-flight-17"), "partial": ("Group", "g-flight-19")},
    "scores": {"two_scores": ("GroupScores", "g-flight-17"), "one_scorer_failed": ("GroupScores", "g-flight-18")},
    "rewards": {"two_rewards": ("GroupRewards", "g-flight-17"), "one_excluded": ("GroupRewards", "g-flight-18")},
    "credits": {"grpo_pair": ("GroupCredits", "g-flight-17"), "no_baseline": ("GroupCredits", "g-flight-18")},
    "samples": {
        "merged_rollout": ("Sample", "r-81f0"),
        "two_policy_versions": ("Sample", "r-9c2e"),
        "group_built": ("GroupBuilt", "g-flight-17"),
        "group_built_all_masked": ("GroupBuilt", "g-flight-19"),
    },
    "policies": {"fourth_version": ("PolicyVersion", 0)},
    "consumptions": {"third_step": ("Consumption", 0)},
    "dead-letters": {"unknown_schema": ("DeadLetter", 0)},
}
"""Topic → example → kind of record, and which: its place among those of its kind, or its rollout or group."""


FAILING: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("calls", "negative_token_id", "first_call_whole_prompt", {"output_ids": [151, -100]}, "cannot pack token ids"),
    ("calls", "intent_without_digest", "call_started", {"prompt_digest": ...}, "field 'prompt_digest' is missing"),
    ("environment", "unknown_kind", "tool_result", {"kind": "click"}, "expected one of"),
    ("terminals", "status_of_another_vocabulary", "succeeded", {"status": "done"}, "expected one of"),
    (
        "rollouts",
        "call_that_is_no_record",
        "succeeded",
        {"calls": ["r-81f0-c0"]},
        "Rollout.calls[0]: got 'r-81f0-c0'",
    ),
    ("rollouts", "claim_of_no_size", "by_claim", {"size_bytes": ...}, "field 'size_bytes' is missing"),
    ("groups", "revision_as_text", "full", {"revision": "0"}, "expected int"),
    ("scores", "one_score_without_list", "two_scores", {"scores": 1.0}, "expected a list"),
    ("rewards", "values_without_components", "two_rewards", {"rewards": [{"value": 1.0}]}, "is missing"),
    ("credits", "unknown_scope", "grpo_pair", {"scope": "batch"}, "expected one of"),
    ("samples", "mask_of_two", "merged_rollout", {"mask": [0, 2]}, "cannot pack mask"),
    ("policies", "version_as_text", "fourth_version", {"version": "4"}, "expected int"),
    ("consumptions", "unknown_field", "third_step", {"loss": 0.5}, "unknown field 'loss'"),
    ("dead-letters", "no_offset", "unknown_schema", {"offset": ...}, "field 'offset' is missing"),
]
"""Topic, name, the passing example it is made from, what is changed (`...` takes the field away), and what the error says."""


def passing() -> Iterator[tuple[str, str, r.Record | ClaimCheck]]:
    """Topic noun, name and record of every passing example."""
    told = story()
    for noun, cases in PASSING.items():
        for name, (kind, which) in cases.items():
            of_kind = [record for record in told[noun] if type(record).__name__ == kind]
            if isinstance(which, str):
                of_kind = sorted((record for record in of_kind if which in _owners(record)), key=_written)
            yield noun, name, of_kind[which if isinstance(which, int) else 0]


def _owners(record: r.Record | ClaimCheck) -> set[object]:
    return {getattr(record, "rollout_id", ""), getattr(getattr(record, "group", record), "group_id", "")}


def _written(record: r.Record | ClaimCheck) -> str:
    return digest_bytes(encode_body(record))


def texts() -> dict[str, str]:
    """Every example file below `schemas/examples/` and its text."""
    records = {(noun, name): record for noun, name, record in passing()}
    found = {
        f"{noun}/v1/{name}.pass.json": {"record": record_name(type(record)), "value": to_readable(record)}
        for (noun, name), record in records.items()
    }
    for noun, name, source, changes, error in FAILING:
        record = records[noun, source]
        values = {**to_readable(record), **changes}
        found[f"{noun}/v1/{name}.fail.json"] = {
            "record": record_name(type(record)),
            "error_contains": error,
            "value": {key: value for key, value in values.items() if value is not ...},
        }
    return {name: _lines(case) + "\n" for name, case in found.items()}


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with one line a field and a list of numbers on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    pad, end = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and len(flat) > 100 - 2 * depth:
        inner = ",\n".join(f"{pad}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items())
        return f"{{\n{inner}\n{end}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        inner = ",\n".join(pad + _lines(item, depth + 1) for item in value)
        return f"[\n{inner}\n{end}]"
    return flat


def main() -> None:
    """Rewrite the examples."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, text in texts().items():
        file = FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
