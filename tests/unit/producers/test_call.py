"""The hard checks. Cases are named as in gateway.md §4.1 of the design notes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rollstream.producers.call import DEFECTS, Verdict, judge, outcome_of
from rollstream.producers.engines.base import Answer, Finish, LabelSpan
from rollstream.schemas.records import LogprobSemantics, Outcome, SamplingParams, VersionSpan
from tests.unit.producers.fakes import PROMPT, identity

P = np.array(PROMPT, dtype=np.uint32)


def answered(ids: list[int], **changes: Any) -> Answer:
    """An answer without a defect, but for the changes."""
    spans = changes.pop("spans", (LabelSpan(0, len(ids), "3"),))
    logprobs = changes.pop("logprobs", [-0.1] * len(ids))
    finish = Finish("stop", spans, changes.pop("echoed", P), changes.pop("counted", len(ids)))
    return Answer(ids, logprobs, finish=finish)


def judged(answer: Answer, **changes: Any) -> Verdict:
    """What the checks say, of a call that is sound but for the changes."""
    values: dict[str, Any] = {
        "outcome": Outcome.COMPLETED,
        "prompt_ids": P,
        "sampling": SamplingParams(1.0, 1.0, -1, 16),
        "identity": identity(),
        "versions": (3, 3),
    }
    return judge(answer, **{**values, **changes})


def defects(answer: Answer, **changes: Any) -> tuple[str, ...]:
    """What the checks find."""
    return judged(answer, **changes).defects


def test_c5_end_token_is_part_of_the_answer() -> None:
    """The end token is a sampled token like any other; a cut answer has none, and both are sound."""
    assert () == defects(answered([28, 2]))
    assert () == defects(answered([28]), outcome=Outcome.LENGTH)


def test_c6_hidden_chunk_that_is_lost_is_found() -> None:
    """The engine counted six tokens and four arrived."""
    assert ("token_count_mismatch",) == defects(answered([13, 18, 14, 2], counted=6))


def test_c6_chunk_without_logprobs_is_found() -> None:
    """Fewer log-probabilities than ids."""
    assert ("token_count_mismatch",) == defects(answered([13, 2], logprobs=[-0.1]))


def test_c8_update_in_the_middle_gives_each_token_its_version() -> None:
    """Two spans that meet cover the answer."""
    answer = answered([10, 11, 10, 11, 2], spans=(LabelSpan(0, 3, "7"), LabelSpan(3, 5, "8")))
    verdict = judged(answer)

    assert ((VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)), ()) == (verdict.spans, verdict.defects)


@pytest.mark.parametrize(
    ("spans", "code"),
    [
        ((), "version_unknown"),
        ((LabelSpan(0, 2, "7"), LabelSpan(3, 5, "8")), "span_gap"),
        ((LabelSpan(0, 3, "7"), LabelSpan(2, 5, "8")), "span_gap"),
        ((LabelSpan(0, 4, "7"),), "span_gap"),
        ((LabelSpan(0, 6, "7"),), "span_gap"),
        ((LabelSpan(0, 5, "step-7"),), "version_label"),
        ((LabelSpan(0, 5, "-1"),), "version_label"),
        ((LabelSpan(0, 5, "٣"),), "version_label"),
        ((LabelSpan(0, 5, "9" * 30),), "version_label"),
        ((LabelSpan(0, 5, "7"), LabelSpan(5, 2**70, "8")), "span_gap"),
        ((LabelSpan(0, None, "7"), LabelSpan(0, 5, "7")), "span_gap"),  # type: ignore[arg-type]
    ],
)
def test_c8_versions_that_are_not_known_of_each_token_are_found(spans: tuple[LabelSpan, ...], code: str) -> None:
    """No spans, a gap, an overlap, a wrong end, a label that is no version."""
    assert (code,) == defects(answered([10, 11, 10, 11, 2], spans=spans))


@pytest.mark.parametrize(
    ("versions", "code"),
    [
        ((7, 7), "version_unknown"),
        ((7, 8), "version_interval"),
        ((None, 8), "version_interval"),
        ((7, None), "version_interval"),
        ((None, None), "version_interval"),
    ],
)
def test_c8_no_spans_are_an_unknown_version_or_interval(versions: tuple[int | None, int | None], code: str) -> None:
    """What the gateway read beside the call never stands in for spans; it says whether the weights moved."""
    silent = answered([28, 2], spans=())

    assert (code, ()) == (*defects(silent, versions=versions), judged(silent, versions=versions).spans)


def test_versions_read_beside_the_call_do_not_judge_spans() -> None:
    """The engine's own word counts."""
    assert () == defects(answered([28, 2]), versions=(None, None))


def test_first_label_is_version_zero() -> None:
    """vLLM's label before any update."""
    answer = answered([28, 2], spans=(LabelSpan(0, 2, "default"),))
    verdict = judged(answer)

    assert (VersionSpan(0, 2, 0),) == verdict.spans


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-9999.0, "logprob_sentinel"),
        (-math.inf, "logprob_sentinel"),
        (None, "logprob_missing"),
        (math.nan, "logprob_missing"),
    ],
)
def test_c9_bad_logprob_keeps_its_place(value: float | None, code: str) -> None:
    """A log-probability that is none becomes NaN where it stood, and the call is not trainable."""
    answer = answered([10, 11, 2], logprobs=[-0.1, value, -0.2])
    verdict = judged(answer)

    assert (code,) == verdict.defects
    np.testing.assert_array_equal(np.array([-0.1, math.nan, -0.2], dtype=np.float32), verdict.logprobs)


def test_positive_logprob_is_found_but_rounding_is_not() -> None:
    """A probability above 1 is none; the rounding of a sure token is."""
    assert ("logprob_positive",) == defects(answered([28, 2], logprobs=[0.1, -0.1]))
    assert () == defects(answered([28, 2], logprobs=[1e-6, -0.1]))


def test_prompt_and_vocabulary_are_checked() -> None:
    """The engine must have been conditioned on what was rendered, and sample what exists."""
    assert ("prompt_mismatch",) == defects(answered([28, 2], echoed=[*P[:-1], 4]))
    assert ("prompt_mismatch",) == defects(answered([28, 2], echoed=P[2:-1]))
    assert ("prompt_mismatch",) == defects(answered([28, 2], echoed=[*P, 4]))
    assert ("vocabulary",) == defects(answered([28, 40]))
    assert ("vocabulary",) == defects(answered([28, -1]), identity=identity(vocabulary_tokens=None))
    assert () == defects(answered([28, 2], echoed=None, counted=None))


@pytest.mark.parametrize("cut", [P[1:], P[:-1]], ids=["left", "right"])
def test_prompt_that_was_cut_to_fit_is_told_apart(cut: Any) -> None:
    """The engine kept the end, or the start."""
    assert ("truncated_prompt",) == defects(answered([28, 2], echoed=cut))


@pytest.mark.parametrize("ids", [[28, None], [28, "2"], [28, 2.0], [28, True], [28, [2]]], ids=str)
def test_what_is_no_id_is_found(ids: list[Any]) -> None:
    """An engine's JSON may hold anything; the call still has its outcome."""
    assert ("vocabulary",) == defects(answered(ids))


@pytest.mark.parametrize("value", ["-0.1", True, [], {}], ids=str)
def test_what_is_no_number_is_no_logprob(value: Any) -> None:
    """It becomes NaN where it stood."""
    verdict = judged(answered([28, 11, 2], logprobs=[-0.5, value, -0.5]))

    assert ("logprob_missing",) == verdict.defects
    np.testing.assert_array_equal(np.array([-0.5, math.nan, -0.5], dtype=np.float32), verdict.logprobs)


def test_logprob_beyond_float32_is_infinite() -> None:
    """It would become -inf in the record."""
    assert ("logprob_sentinel",) == defects(answered([28, 2], logprobs=[-1e300, -0.1]))


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(0.7, 1.0, -1, 16), SamplingParams(1.0, 0.9, -1, 16), SamplingParams(1.0, 1.0, 50, 16)],
    ids=["temperature", "top_p", "top_k"],
)
def test_raw_logprobs_of_a_changed_distribution_are_refused(sampling: SamplingParams) -> None:
    """Tempered or truncated, the model's own log-probabilities are not those that the tokens were drawn with."""
    raw = identity(semantics=LogprobSemantics.RAW)

    assert ("semantics_raw",) == defects(answered([2]), sampling=sampling, identity=raw)
    assert () == defects(answered([2]), sampling=sampling)


def test_semantics_must_be_those_of_the_sampled_distribution() -> None:
    """Raw log-probabilities are the sampled ones at temperature 1 only."""
    assert ("semantics_unknown",) == defects(answered([2]), identity=identity(semantics=LogprobSemantics.UNKNOWN))
    assert () == defects(answered([2]), identity=identity(semantics=LogprobSemantics.RAW))


def test_partial_and_empty_answers_are_not_trainable() -> None:
    """What did not end by itself or by its limit, and what holds nothing."""
    cut = Answer([28], [-0.1])

    assert ("version_unknown", "not_completed") == defects(cut, outcome=Outcome.CLIENT_DISCONNECTED)
    assert ("empty_output",) == defects(answered([]))


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [("stop", Outcome.COMPLETED), ("length", Outcome.LENGTH), ("abort", Outcome.ABORTED), ("error", Outcome.UPSTREAM_ERROR),
     ("repetition", Outcome.COMPLETED), ("", Outcome.UPSTREAM_ERROR)],
)  # fmt: skip
def test_engine_word_gives_the_outcome(reason: str, outcome: Outcome) -> None:
    """An abort is never a stop."""
    assert outcome == outcome_of(Answer(finish=Finish(reason)))


def test_every_code_is_explained() -> None:
    """A person can look up each code."""
    assert all(DEFECTS.values())


def test_abort_while_weights_change_is_told_apart() -> None:
    """Whoever counts aborts must see which of them the trainer brought about."""
    aborted = Answer(finish=Finish("abort"), pause_mode="abort")

    assert Outcome.ABORTED_POLICY_UPDATE == outcome_of(aborted)


def test_stop_string_is_told_apart_from_the_models_own_end() -> None:
    """Its tokens are a sample like any other."""
    stopped = Answer(finish=Finish("stop", stop_string="END"))

    assert Outcome.STOP_STRING == outcome_of(stopped)
    assert Outcome.STOP_STRING.is_whole
