"""What the gateway remembers of rollouts. Cases are named as in gateway.md §4.1 of the design notes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollstream.producers.rollout_memory import Connection, MemoryOfRollouts, OpenCall, RolloutMemory
from tests.unit.producers.fakes import PROMPT

P = list(PROMPT)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def test_c1_other_split_of_the_same_text_is_not_shared() -> None:
    """The echo is tokenised otherwise than it was sampled: the prompts share their start and no more."""
    memories = MemoryOfRollouts()
    memory = memories.of("r", 0)
    memories.add_base(memory, "call-1", ids(*P), ids(10, 11, 2), memory.delta(ids(*P)))

    delta = memory.delta(ids(*P, 12, 2, 3, 1, 4, 3, 11, 2, 3, 1, 5, 3))

    assert ("call-1", 9) == (delta.base_call_id, delta.base_len)


def test_exact_echo_shares_prompt_and_answer() -> None:
    """The prompt of the next turn is written as what it adds."""
    memories = MemoryOfRollouts()
    memory = memories.of("r", 0)
    memories.add_base(memory, "call-1", ids(*P), ids(28, 2), memory.delta(ids(*P)))

    delta = memory.delta(ids(*P, 28, 2, 3, 1))

    assert ("call-1", 11, 13, ids(3, 1).tobytes()) == (delta.base_call_id, delta.base_len, delta.length, delta.suffix)


def test_base_that_a_later_one_holds_whole_is_forgotten() -> None:
    """A straight conversation keeps one base, a branching one all that are open."""
    memories = MemoryOfRollouts()
    memory = memories.of("r", 0)
    memories.add_base(memory, "1", ids(*P), ids(28, 2), memory.delta(ids(*P)))
    longer = ids(*P, 28, 2, 3, 1, 5, 3)
    memories.add_base(memory, "2", longer, ids(29, 2), memory.delta(longer))
    branch = ids(*P, 29, 2)
    memories.add_base(memory, "3", branch, ids(2), memory.delta(branch))

    assert ["2", "3"] == list(memory.bases)


def arrived(memory: RolloutMemory, name: str, *, is_retry: bool = False, digest: str = "d") -> OpenCall:
    """A request; its call would be `name` if it is a new one."""
    return memory.arrive(digest, name, Connection(), is_retry=is_retry)


def written(memory: RolloutMemory, name: str, **more: Any) -> OpenCall:
    """A request whose intent is in Kafka."""
    call = arrived(memory, name, **more)
    call.is_written = True
    return call


def names(*calls: OpenCall) -> list[tuple[str, int]]:
    return [(call.call_id, call.call_attempt) for call in calls]


def test_c11_retry_continues_only_what_did_not_arrive() -> None:
    """An equal request is a retry once for each earlier answer that did not reach the client, else a new call."""
    memory = RolloutMemory()
    memory.lose(written(memory, "1"))

    assert [("1", 1), ("3", 0), ("4", 0)] == names(
        written(memory, "2"), written(memory, "3"), written(memory, "4", digest="other")
    )


def test_c11_equal_requests_at_once_are_calls_of_their_own() -> None:
    """While the first is open, and after it was delivered."""
    memory = RolloutMemory()
    first, second = written(memory, "1"), written(memory, "2")
    memory.settle(first)
    memory.settle(second)

    assert [("1", 0), ("2", 0), ("3", 0)] == names(first, second, written(memory, "3"))


def test_retry_that_comes_before_the_outcome_is_written_is_a_retry() -> None:
    """The client has left; what it left behind is still being written."""
    memory = RolloutMemory()
    first = written(memory, "1")
    first.connection.is_gone = True
    second = written(memory, "2")
    memory.lose(first)  # its outcome is written now

    assert [("1", 1), ("3", 0)] == names(second, written(memory, "3"))


def test_marked_retry_continues_the_oldest_open_call() -> None:
    """The client gave the first one up, though its connection does not show it; what works for it stops."""
    memory = RolloutMemory()
    first, second = written(memory, "1"), written(memory, "2")
    retry = written(memory, "3", is_retry=True)

    assert [("1", 1)] == names(retry)
    assert [(True, True), (False, False)] == [(c.is_replaced, c.connection.is_gone) for c in (first, second)]


def test_marked_retry_prefers_what_did_not_arrive() -> None:
    """Of two equal calls the closed one was sent again."""
    memory = RolloutMemory()
    first, second = written(memory, "1"), written(memory, "2")
    memory.lose(second)

    assert [("2", 1)] == names(arrived(memory, "3", is_retry=True))
    assert not first.is_replaced


def test_marked_retry_of_what_nobody_knows_is_a_new_call() -> None:
    """After a restart, or on another replica."""
    assert [("1", 0)] == names(arrived(RolloutMemory(), "1", is_retry=True))


def test_undelivered_twins_pair_in_order() -> None:
    """They are exchangeable."""
    memory = RolloutMemory()
    for call in [written(memory, "1"), written(memory, "2")]:
        memory.lose(call)

    assert [("1", 1), ("2", 1)] == names(arrived(memory, "3"), arrived(memory, "4"))


def test_attempt_that_was_never_written_takes_no_number() -> None:
    """A first attempt that came to nothing leaves no call; a further one leaves its number to the next."""
    memory = RolloutMemory()
    memory.lose(arrived(memory, "1"))
    memory.lose(written(memory, "2"))
    memory.lose(arrived(memory, "3"))

    assert [("2", 1)] == names(arrived(memory, "4"))


def test_number_of_undelivered_calls_is_bounded() -> None:
    """The oldest are forgotten; their retries are new calls."""
    memory = RolloutMemory()
    for at in range(100):
        memory.lose(written(memory, f"{at}", digest=f"d-{at}"))

    assert 64 == len(memory.open_calls)
    assert [("new", 0), ("99", 1)] == names(
        arrived(memory, "new", digest="d-0"), arrived(memory, "new", digest="d-99")
    )


@pytest.mark.parametrize("agents", [2, 5])
def test_tails_of_sub_agents_are_bases_at_once(agents: int) -> None:
    """Calls of several conversations come mixed; each prompt is written against the end of its own."""
    memories = MemoryOfRollouts()
    memory = memories.of("r", 0)
    tails = {agent: ids(*P, 100 + agent) for agent in range(agents)}
    for turn in range(6):
        for agent in range(agents):
            prompt = np.append(tails[agent], ids(turn, 7))
            delta = memory.delta(prompt)
            if turn:
                assert (f"{agent}-{turn - 1}", len(tails[agent])) == (delta.base_call_id, delta.base_len)
            memories.add_base(memory, f"{agent}-{turn}", prompt, ids(40 + agent, 2), delta)
            tails[agent] = np.concatenate([prompt, ids(40 + agent, 2)])

    assert agents == len(memory.bases)
    assert sum(map(len, memory.bases.values())) == memories.ids


def test_tails_of_a_rollout_are_bounded() -> None:
    """Prompts that share nothing: the oldest bases go, in number and in ids, and the newest stays."""
    memories = MemoryOfRollouts(max_ids=25)
    memory = memories.of("r", 0)
    counts = []
    for at in range(20):
        prompt = ids(*range(100 * at + 100, 100 * at + 109))
        memories.add_base(memory, f"{at}", prompt, ids(1), memory.delta(prompt))
        counts.append((len(memory.bases), memories.ids))

    assert [(1, 10), (2, 20), (2, 20)] == counts[:3]
    assert (["18", "19"], 20) == (list(memory.bases), memories.ids)
    many = MemoryOfRollouts()
    memory = many.of("r", 0)
    for at in range(20):
        many.add_base(memory, f"{at}", ids(100 + at), ids(1), memory.delta(ids(100 + at)))
    assert ([f"{at}" for at in range(12, 20)], 16) == (list(memory.bases), many.ids)


def test_index_rises_over_restarts() -> None:
    """A gateway without memory goes on behind what an earlier one counted, and equal times count up."""
    first, second = MemoryOfRollouts().of("r", 0), MemoryOfRollouts().of("r", 0)

    indexes = [first.next_index(0), first.next_index(0), first.next_index(40), second.next_index(900)]

    assert [0, 1, 40, 900] == indexes


def test_least_recently_used_rollout_makes_room() -> None:
    """Memory is bounded in rollouts and in ids; what was forgotten takes nothing in any more."""
    memories = MemoryOfRollouts(max_rollouts=2, max_ids=20)
    old = memories.of("a", 0)
    memories.add_base(old, "1", ids(*P), ids(2), old.delta(ids(*P)))
    memories.of("b", 0)
    memories.of("c", 0)
    memories.add_base(old, "2", ids(*P), ids(2), old.delta(ids(*P)))

    assert (2, {}, None) == (len(memories), old.bases, memories.of("a", 0).delta(ids(*P)).base_call_id)
