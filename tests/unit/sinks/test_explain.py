"""Explain: from a token back to everything, with clear answers where there is no way back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from clickhouse_connect.driver.client import Client

from rollstream.errors import AuditError
from rollstream.schemas.records import Consumption, ModelCall, Sample
from rollstream.schemas.types import unpack_ids, unpack_mask
from rollstream.sinks.base import Chunk, LogRecord, Source
from rollstream.sinks.clickhouse import ClickHouseSink
from rollstream.sinks.explain import explain
from tests.unit.sinks.chain import CODEC, Log


@pytest.fixture(scope="module")
def store(engine: str, log: Log) -> Iterator[Client]:
    from rollstream.sinks.connect import connect

    client = connect(f"{engine}?database=explain")
    sample = next(record for record in log.records["samples"] if isinstance(record, Sample))
    step = Consumption("c-1", "run-1", 7, "default", 4, 5, (sample.sample_id,), (sample.group_id,), (), 5)
    consumed = Chunk(Source("rollstream.consumptions.v1", 0), 0, 0, (LogRecord(0, CODEC.encode(step)),))
    ClickHouseSink(client).write([*log.chunks(), consumed])
    yield client
    client.command("DROP DATABASE explain")


@pytest.fixture
def sample(log: Log) -> Sample:
    return next(record for record in log.records["samples"] if isinstance(record, Sample))


def test_every_sampled_token_leads_to_its_call(store: Client, log: Log, sample: Sample) -> None:
    """Ids, log-probabilities and the true prefix, for all tokens of a sample of two calls."""
    calls = {call.call_id: call for call in log.records["calls"] if isinstance(call, ModelCall)}

    for token in np.flatnonzero(unpack_mask(sample.mask)).tolist():
        found = explain(store, sample.sample_id, token)

        call = calls[found.call["call_id"]]
        assert unpack_ids(call.output_ids)[found.call["output_token"]] == found.token_id
        assert found.prefix_length == token == found.prompt_length + found.call["output_token"]
        assert found.prefix_holds
        assert call.prompt.digest == found.prompt_digest
        assert any(
            s.start <= found.call["output_token"] < s.end and s.version == found.version for s in call.version_spans
        )


def test_token_is_the_first_sampled_one_where_none_is_named(store: Client, sample: Sample) -> None:
    """Position of the first segment."""
    found = explain(store, sample.sample_id)

    assert sample.segments[0].start == found.token


def test_explanation_names_the_whole_way(store: Client, sample: Sample) -> None:
    """Rollout, group, raw score, reward, credit, all six stages, and the step that trained on it."""
    found = explain(store, sample.sample_id)

    assert (sample.rollout_id, sample.group_id) == (found.rollout["rollout_id"], found.group["group_id"])
    assert [1.0] == [score.value for score in found.scores]
    assert sample.reward == found.reward.value
    assert 1 == found.call["number"]
    assert np.float32(found.credit.value) == np.float32(found.advantage)
    assert ["join", "group", "score", "reward", "credit", "build"] == [stage.name for stage in found.stages]
    assert ["run-1 step 7"] == found.consumed_by


def test_explanation_prints_and_is_json(store: Client, sample: Sample) -> None:
    """For people and for programs."""
    found = explain(store, sample.sample_id)

    assert json.loads(json.dumps(found.as_dict()))["token_id"] == found.token_id
    for word in (
        "token ",
        "call ",
        "prefix ",
        "verified",
        "rollout ",
        "group ",
        "score ",
        "reward ",
        "credit ",
        "stages ",
    ):
        assert word in str(found)


def test_unknown_sample_says_so(store: Client) -> None:
    """Nothing is guessed."""
    with pytest.raises(AuditError, match="cannot explain sample 'nope': it is not stored"):
        explain(store, "nope")


@pytest.mark.parametrize("token", [-1, 100_000])
def test_token_out_of_range_says_the_range(store: Client, sample: Sample, token: int) -> None:
    """The message shows what there is."""
    with pytest.raises(AuditError, match=f"it has tokens 0 to {len(sample.mask) - 1}"):
        explain(store, sample.sample_id, token)


def test_token_that_was_not_sampled_names_the_nearest_one(store: Client, sample: Sample) -> None:
    """A prompt token has no call that sampled it."""
    with pytest.raises(AuditError, match=f"it was not sampled.*sampled one is {sample.segments[0].start}"):
        explain(store, sample.sample_id, 0)
