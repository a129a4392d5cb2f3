"""The comparison over worlds in which one thing was lost, doubled or changed: it finds exactly that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from chaos.check_group import Held, certainties
from chaos.ledger import GroupTruth
from chaos.problem import Rules
from rollstream.schemas.records import Delivery, GroupClose, MaskedCall, RolloutStatus, VersionSpan
from rollstream.schemas.types import Json, pack_floats, pack_ids, pack_mask, unpack_floats, unpack_ids, unpack_mask
from rollstream.sinks.stored import Evidence
from tests.unit.chaos.world import RULES, Agent, World, changed, motley_world, plain_world, problems

Judged = tuple[GroupTruth, Evidence, Held]
Found = str | tuple[str, ...]
"""What a problem must be about: what was changed, and what cannot be right without it."""


@pytest.fixture
def world() -> Judged:
    return plain_world().judged()


@pytest.mark.parametrize("make", [plain_world, motley_world])
def test_nothing_is_found_where_nothing_is_wrong(make: Callable[[], object]) -> None:
    """Retries, late calls, vanished agents, replaced attempts and cut calls are no problems."""
    truth, evidence, held = make().judged()  # type: ignore[attr-defined]

    assert [] == problems(truth, evidence, held)
    assert len(evidence.samples) > 0


def tampered_ids(packed: bytes, at: int = 1) -> bytes:
    ids = unpack_ids(packed).copy()
    ids[at] = 70_000 + ord("~") if ids[at] != 70_000 + ord("~") else 70_000 + ord("!")
    return pack_ids(ids)


def tampered_floats(packed: bytes, at: int) -> bytes:
    values = unpack_floats(packed).copy()
    values[at] += 0.25
    return pack_floats(values)


def first_sampled(evidence: Evidence) -> int:
    return int(np.flatnonzero(unpack_mask(evidence.samples[0].mask))[0])


def lose_outcome(evidence: Evidence) -> Found:
    return evidence.calls.pop(2).call_id, evidence.samples[
        0
    ].sample_id  # the last of its rollout: no prompt builds on it


def lose_intent(evidence: Evidence) -> str:
    return evidence.starts.pop(4).call_id


def lose_event(evidence: Evidence) -> str:
    return evidence.events.pop(4).event_id


def lose_terminal(evidence: Evidence) -> str:
    return evidence.terminals.pop(1).rollout_id


def lose_opening(evidence: Evidence) -> str:
    return evidence.openings.pop(1).rollout_id


def lose_sample(evidence: Evidence) -> Found:
    one = evidence.samples.pop(1)
    return one.sample_id, *(segment.call_id for segment in one.segments)


def lose_built(evidence: Evidence) -> str:
    return evidence.built.pop().group_id


def lose_call_in_rollout(evidence: Evidence) -> str:
    call_id = evidence.rollouts[0].calls[1].call_id
    changed(evidence.rollouts, 0, calls=(evidence.rollouts[0].calls[0], evidence.rollouts[0].calls[2]))
    return call_id


def lose_event_in_rollout(evidence: Evidence) -> str:
    event_id = evidence.rollouts[0].event_ids[0]
    changed(evidence.rollouts, 0, event_ids=evidence.rollouts[0].event_ids[1:])
    return event_id


def close_group_early(evidence: Evidence) -> str:
    changed(evidence.groups, 0, closed_by=GroupClose.TIMEOUT)
    return evidence.group_id


def double_outcome(evidence: Evidence) -> Found:
    call = evidence.calls[8]
    twin = replace(call, call_id=f"{call.call_id}-again")
    evidence.calls.append(twin)
    return call.call_id, twin.call_id  # the engine would have said something else to it


def double_content(evidence: Evidence) -> str:
    call = evidence.calls[8]
    evidence.calls.append(replace(call, delivered=Delivery.FULL))
    return call.call_id


def double_rollout(evidence: Evidence) -> str:
    evidence.rollouts.append(replace(evidence.rollouts[1], sampled_tokens=0))
    return evidence.rollouts[1].rollout_id


def double_sample_content(evidence: Evidence) -> str:
    # What the store says last is what counts, and it is the right one.
    evidence.samples.insert(0, replace(evidence.samples[0], sample_index=5))
    return evidence.samples[0].sample_id


def train_twice(evidence: Evidence) -> str:
    one = evidence.samples[2]
    changed(evidence.samples, 2, segments=(*one.segments, one.segments[0]))
    return one.segments[0].call_id


def wrong_token(evidence: Evidence) -> str:
    changed(evidence.calls, 8, output_ids=tampered_ids(evidence.calls[8].output_ids))
    return evidence.calls[8].call_id


def wrong_logprob(evidence: Evidence) -> str:
    changed(evidence.calls, 8, output_logprobs=tampered_floats(evidence.calls[8].output_logprobs, 1))
    return evidence.calls[8].call_id


def wrong_version(evidence: Evidence) -> str:
    spans = (VersionSpan(0, len(evidence.calls[8].output_ids) // 4, 9),)
    changed(evidence.calls, 8, version_spans=spans)
    return evidence.calls[8].call_id


def wrong_event(evidence: Evidence) -> str:
    changed(evidence.events, 4, content=Json('{"text":"other"}'))
    return evidence.events[4].event_id


def wrong_reward(evidence: Evidence) -> str:
    changed(evidence.terminals, 1, outcome=Json('{"reward":0.75}'))
    return evidence.terminals[1].rollout_id


def wrong_status(evidence: Evidence) -> str:
    changed(evidence.rollouts, 1, status=RolloutStatus.TRUNCATED)
    return evidence.rollouts[1].rollout_id


def wrong_sample_token(evidence: Evidence) -> str:
    changed(
        evidence.samples, 0, ids=tampered_ids(evidence.samples[0].ids, len(unpack_ids(evidence.samples[0].ids)) - 2)
    )
    return evidence.samples[0].sample_id


def wrong_sample_logprob(evidence: Evidence) -> str:
    at = first_sampled(evidence)
    changed(evidence.samples, 0, logprobs=tampered_floats(evidence.samples[0].logprobs, at))
    return evidence.samples[0].sample_id


def wrong_mask(evidence: Evidence) -> str:
    mask = unpack_mask(evidence.samples[0].mask).copy()
    mask[first_sampled(evidence)] = 0
    changed(evidence.samples, 0, mask=pack_mask(mask))
    return evidence.samples[0].sample_id


def wrong_advantage(evidence: Evidence) -> str:
    at = first_sampled(evidence)
    changed(evidence.samples, 0, advantages=tampered_floats(evidence.samples[0].advantages, at))
    return evidence.samples[0].sample_id


def wrong_sample_reward(evidence: Evidence) -> str:
    changed(evidence.samples, 0, reward=0.125)
    return evidence.samples[0].sample_id


def wrong_weight(evidence: Evidence) -> str:
    changed(evidence.samples, 0, loss_weight=evidence.samples[0].loss_weight * 2)
    return evidence.samples[0].rollout_id


@pytest.mark.parametrize(
    "change",
    [
        lose_intent, lose_event, lose_terminal, lose_opening, lose_sample, lose_built, lose_event_in_rollout,
        close_group_early, double_outcome, double_content, double_rollout, double_sample_content, train_twice,
        wrong_token, wrong_logprob, wrong_version, wrong_event, wrong_reward, wrong_status, wrong_sample_token,
        wrong_sample_logprob, wrong_mask, wrong_advantage, wrong_sample_reward, wrong_weight, lose_outcome,
        lose_call_in_rollout,
    ],
)  # fmt: skip
def test_one_change_is_found_and_nothing_else(world: Judged, change: Callable[[Evidence], Found]) -> None:
    """A store in which one thing was changed has problems of that kind, about that thing."""
    truth, evidence, held = world
    about = change(evidence)
    kind = {"lose": "lost", "close": "lost", "double": "doubled", "train": "doubled", "wrong": "wrong"}

    found = problems(truth, evidence, held)

    abouts = (about,) if isinstance(about, str) else about
    assert (kind[change.__name__.partition("_")[0]], abouts[0]) == (found[0].kind, found[0].about)
    assert set(abouts) == {problem.about for problem in found}


def test_call_behind_the_finish_must_be_a_dead_letter() -> None:
    """What was acknowledged after the barrier is in no rollout; nobody may just drop it."""
    truth, evidence, held = motley_world().judged()

    found = problems(truth, evidence, replace(held, call_ids=held.call_ids - {"g1-0-0-c4"}))

    assert [("lost", "g1-0-0-c4")] == [(problem.kind, problem.about) for problem in found]


def test_attempt_that_was_replaced_must_not_count() -> None:
    """A group of rollouts that were all finished in time holds their last attempts."""
    world = World(size=2)
    agent = Agent(world, 0)
    agent.call()
    agent.finish(1.0)
    Agent(world, 1).call()
    again = Agent(world, 1, 1)
    again.call()
    again.finish(0.0)
    truth, evidence, held = world.judged()
    assert [] == problems(truth, evidence, held)

    group = evidence.groups[0]
    changed(evidence.groups, 0, members=(group.members[0], replace(group.members[1], attempt=0)))

    assert ("wrong", "g1-1") in [(problem.kind, problem.about) for problem in problems(truth, evidence, held)]


def test_acknowledged_call_must_not_be_masked_where_it_could_teach(world: Judged) -> None:
    """A call that the client relies on, in a rollout with a reward and a baseline, belongs into a sample."""
    truth, evidence, held = world
    one = evidence.samples.pop(1)
    reasons = tuple(MaskedCall(s.call_id, one.rollout_id, "base_missing") for s in one.segments)
    sample_ids = tuple(sample_id for sample_id in evidence.built[0].sample_ids if sample_id != one.sample_id)
    changed(evidence.built, 0, sample_ids=sample_ids, masked=reasons)

    found = problems(truth, evidence, held)

    assert {("lost", s.call_id) for s in one.segments} == {(problem.kind, problem.about) for problem in found}


def test_rollouts_without_a_group_are_lost(world: Judged) -> None:
    """All finished in time, and nothing made a group of them."""
    truth, evidence, held = world
    for rows in (evidence.groups, evidence.built, evidence.samples):
        rows.clear()

    assert [("lost", "g1")] == [(problem.kind, problem.about) for problem in problems(truth, evidence, held)]


def test_nothing_stored_at_all_is_lost() -> None:
    """An empty store has lost every opening, call, event, finish and rollout that was acknowledged."""
    truth, _, _ = plain_world().judged()

    found = problems(truth, Evidence("g1"), Held())

    assert {"lost"} == {problem.kind for problem in found}
    assert len(found) == 3 + 9 + 9 + 3 + 3


def test_what_nobody_sent_is_wrong(world: Judged) -> None:
    """A call, event or rollout of an attempt that no client opened."""
    truth, evidence, held = world
    changed(evidence.calls, 0, rollout_id="r-9")
    changed(evidence.events, 0, attempt=7)

    found = {(problem.kind, problem.about) for problem in problems(truth, evidence, held)}

    assert {("wrong", evidence.calls[0].call_id), ("wrong", evidence.events[0].event_id)} <= found


def test_rollout_that_took_longer_than_its_deadline_may_be_timed_out() -> None:
    """Where time decides, only what holds in any case is asked for."""
    world = World(size=2)
    for number in range(2):
        agent = Agent(world, number)
        agent.event(agent.call())
        world.now_ms += RULES.join_deadline_ms * number
        agent.finish(1.0)

    assert [] == problems(*world.judged())


def test_it_is_told_how_much_was_certain() -> None:
    """A comparison that may ask for next to nothing says so."""
    plain, motley = (make().judged()[0] for make in (plain_world, motley_world))

    assert ((3, True), (3, False)) == (certainties(plain, RULES), certainties(motley, RULES))
    assert (0, False) == certainties(plain, Rules(join_deadline_ms=1, group_deadline_ms=1))
