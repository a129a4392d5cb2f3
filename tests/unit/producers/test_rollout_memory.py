"""What the gateway remembers of rollouts. Cases are named as in gateway.md §4.1 of the design notes."""

from __future__ import annotations

import numpy as np

from rollstream.producers.rollout_memory import MemoryOfRollouts
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


def test_c11_retry_continues_only_what_did_not_arrive() -> None:
    """An equal request is a retry once for each earlier answer that did not reach the client, else a new call."""
    memory = MemoryOfRollouts().of("r", 0)
    memory.remember_undelivered("d", "call-1", 0)

    found = [memory.retry_of("d"), memory.retry_of("d"), memory.retry_of("other")]

    assert [("call-1", 1), None, None] == found


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
