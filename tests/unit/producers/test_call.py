"""The hard checks. Cases are named as in gateway.md §4.1 of the design notes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rollstream.producers.call import DEFECTS, judge, outcome_of
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


def defects(
    answer: Answer, *, temperature: float = 1.0, outcome: Outcome = Outcome.COMPLETED, **engine: Any
) -> tuple[str, ...]:
    """What the checks find."""
    sampling = SamplingParams(temperature, 1.0, -1, 16)
    return judge(answer, outcome=outcome, prompt_ids=P, sampling=sampling, identity=identity(**engine)).defects


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
    verdict = judge(
        answer, outcome=Outcome.COMPLETED, prompt_ids=P, sampling=SamplingParams(1, 1, -1, 9), identity=identity()
    )

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
    ],
)
def test_c8_versions_that_are_not_known_of_each_token_are_found(spans: tuple[LabelSpan, ...], code: str) -> None:
    """No spans, a gap, an overlap, a wrong end, a label that is no version."""
    assert (code,) == defects(answered([10, 11, 10, 11, 2], spans=spans))


def test_first_label_is_version_zero() -> None:
    """vLLM's label before any update."""
    answer = answered([28, 2], spans=(LabelSpan(0, 2, "default"),))
    verdict = judge(
        answer, outcome=Outcome.COMPLETED, prompt_ids=P, sampling=SamplingParams(1, 1, -1, 9), identity=identity()
    )

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
    verdict = judge(
        answer, outcome=Outcome.COMPLETED, prompt_ids=P, sampling=SamplingParams(1, 1, -1, 9), identity=identity()
    )

    assert (code,) == verdict.defects
    np.testing.assert_array_equal(np.array([-0.1, math.nan, -0.2], dtype=np.float32), verdict.logprobs)


def test_positive_logprob_is_found_but_rounding_is_not() -> None:
    """A probability above 1 is none; the rounding of a sure token is."""
    assert ("logprob_positive",) == defects(answered([28, 2], logprobs=[0.1, -0.1]))
    assert () == defects(answered([28, 2], logprobs=[1e-6, -0.1]))


def test_prompt_and_vocabulary_are_checked() -> None:
    """The engine must have been conditioned on what was rendered, and sample what exists."""
    assert ("prompt_mismatch",) == defects(answered([28, 2], echoed=P[1:]))
    assert ("vocabulary",) == defects(answered([28, 40]))
    assert ("vocabulary",) == defects(answered([28, -1]), vocabulary_tokens=None)
    assert () == defects(answered([28, 2], echoed=None, counted=None))


def test_semantics_must_be_those_of_the_sampled_distribution() -> None:
    """Raw log-probabilities are the sampled ones at temperature 1 only."""
    assert ("semantics_unknown",) == defects(answered([2]), semantics=LogprobSemantics.UNKNOWN)
    assert ("semantics_raw",) == defects(answered([2]), temperature=0.7, semantics=LogprobSemantics.RAW)
    assert () == defects(answered([2]), temperature=1.0, semantics=LogprobSemantics.RAW)


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
