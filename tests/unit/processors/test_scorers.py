"""Scorers: what the built-in ones say, and that no scorer can do more harm than miss its own score."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from rollstream.errors import SettingsError
from rollstream.processors.config import ScorerConfig
from rollstream.processors.scorers import make_scorer
from rollstream.processors.scorers.base import Said, run_scorer
from rollstream.schemas.records import Rollout
from rollstream.schemas.types import Json
from tests.unit.processors import own_scorers
from tests.unit.processors.records import a_rollout, call

OWN = "tests.unit.processors.own_scorers"


async def say(kind: str, rollout: Rollout, timeout_s: float = 10.0, **config: object) -> Said:
    """What a scorer says about a rollout."""
    scorer = make_scorer(ScorerConfig(name="s", kind=kind, config=config))
    return await run_scorer(scorer, rollout, timeout_s)


@pytest.mark.parametrize(
    ("outcome", "field", "value"),
    [
        ({"reward": 0.25}, "reward", 0.25),
        ({"reward": True}, "reward", 1.0),
        ({"result": {"won": False}}, "result.won", 0.0),
        ({"reward": -2}, "reward", -2.0),
    ],
)
async def test_environment_outcome_reads_a_field(outcome: object, field: str, value: float) -> None:
    """The environment's number is the score; true and false are 1 and 0."""
    said = await say("environment_outcome", a_rollout(outcome=Json(json.dumps(outcome))), field=field)

    assert (value, None) == (said.value, said.error)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [("{}", "no_value"), ('{"reward": null}', "no_value"), ('{"reward": "1"}', "bad_value"), ("nonsense", "raised")],
)
async def test_environment_outcome_never_guesses(outcome: str, reason: str) -> None:
    """Without a number there is no score, and the error says why."""
    said = await say("environment_outcome", a_rollout(outcome=Json(outcome)))

    assert said.value is None
    assert (said.error or "").startswith(f"{reason}: ")


@pytest.mark.parametrize(
    ("content", "config", "value"),
    [
        (" 4\n", {}, 1.0),
        (" 4\n", {"strip": False}, 0.0),
        ("5", {}, 0.0),
        ([{"type": "text", "text": "4"}], {}, 1.0),
        (None, {}, 0.0),
    ],
)
async def test_exact_match_compares_the_last_message(
    content: object, config: dict[str, object], value: float
) -> None:
    """The text of the last call is compared with the task's answer."""
    calls = [
        call("c-0", message=Json('{"content": "4"}')),
        call("c-1", 1, message=Json(json.dumps({"content": content}))),
    ]

    said = await say("exact_match", a_rollout(calls=calls), **config)

    assert value == said.value


async def test_exact_match_reads_the_outcome_where_told() -> None:
    """Some environments hand in the answer themselves."""
    rollout = a_rollout(outcome=Json('{"answer": "FOUR"}'), task=Json('{"gold": "four"}'))

    said = await say("exact_match", rollout, expected="gold", outcome_field="answer", ignore_case=True)

    assert (1.0, '{"expected":"four","found":"four"}') == (said.value, said.verdict)


async def test_function_gets_rollout_and_config() -> None:
    """A function of the user's own is called with the rollout and its configuration."""
    rollout = a_rollout(calls=[call("c-0"), call("c-1", 1)])

    said = [
        await say(f"{OWN}:count_calls", rollout, weight=0.5),
        await say(f"{OWN}:explained", rollout),
        await say(f"{OWN}:a_bool", rollout),
    ]

    assert [1.0, 0.5, 1.0] == [one.value for one in said]
    assert '{"seen":"r-1"}' == said[1].verdict


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("broken", "raised"),
        ("quits", "raised"),
        ("quits_later", "raised"),
        ("not_a_number", "bad_value"),
        ("a_string", "bad_value"),
        ("nothing", "no_value"),
    ],
)
async def test_function_that_fails_is_a_missing_score_with_an_error(function: str, reason: str) -> None:
    """Whatever a scorer does wrong is recorded; a missing score is never 0."""
    said = await say(f"{OWN}:{function}", a_rollout())

    assert said.value is None
    assert (said.error or "").startswith(f"{reason}: ")


async def test_error_text_fits_into_a_record() -> None:
    """A message that is no UTF-8, or endless, would end the worker when the scores are written, again and again."""
    said = await say(f"{OWN}:babbles", a_rollout())

    assert (said.error or "").startswith("raised: ValueError: \\udcff")
    assert len(said.error or "") < 3_000
    assert (said.error or "").encode()


@pytest.mark.parametrize("function", ["stuck", "deaf"])
async def test_function_that_never_returns_is_timed_out(function: str) -> None:
    """A thread that hangs, or a coroutine that ignores its cancellation, costs its own score and nothing else."""
    own_scorers.RELEASE.clear()

    hanging, other = await asyncio.gather(
        say(f"{OWN}:{function}", a_rollout(), timeout_s=0.05), say(f"{OWN}:count_calls", a_rollout())
    )
    own_scorers.RELEASE.set()

    assert (hanging.error or "").startswith("timeout: ")
    assert 0.0 == other.value


def test_function_that_never_returns_does_not_keep_the_process() -> None:
    """A process whose scorer hangs in a thread can still end."""
    program = f"""
import asyncio
from rollstream.processors.config import ScorerConfig
from rollstream.processors.scorers import make_scorer
from rollstream.processors.scorers.base import run_scorer
from tests.unit.processors.records import a_rollout
scorer = make_scorer(ScorerConfig(name="s", kind="{OWN}:stuck"))
print(asyncio.run(run_scorer(scorer, a_rollout(), 0.05)).error)
"""

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout.startswith("timeout: ")


@pytest.mark.parametrize("kind", ["no.such.module:f", f"{OWN}:missing", f"{OWN}:not_callable"])
def test_function_that_cannot_be_called_is_refused_at_load(kind: str) -> None:
    """A wrong name is found before records flow."""
    with pytest.raises(SettingsError, match="scorer"):
        make_scorer(ScorerConfig(name="s", kind=kind))


def test_function_that_does_not_take_its_config_is_refused_at_load() -> None:
    """A misspelt knob is found before records flow."""
    with pytest.raises(SettingsError, match="wieght"):
        make_scorer(ScorerConfig(name="s", kind=f"{OWN}:count_calls", config={"wieght": 1}))
