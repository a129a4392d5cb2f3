"""A worker that was replaced under its own instance id stops; one that was only asleep joins again."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import BrokerError
from rollstream.processors.shell.membership import Membership


class HeartbeatResponse:
    def __init__(self, error_code: int) -> None:
        self.error_code = error_code


class OffsetCommitResponse:
    def __init__(self, *codes: int) -> None:
        self.topics = [("calls", list(enumerate(codes)))]


class JoinGroupResponse(HeartbeatResponse):
    pass


class _Group:
    """A membership whose coordinator answers as told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answer: Any = None
        self.frozen_s = 0.0
        self.fenced: list[BaseException] = []
        self.membership = Membership(self._answer, "w1", 10.0, self._on_fenced, lambda: self.now)

    async def _answer(self, _request: Any) -> Any:
        self.now += self.frozen_s
        return self.answer

    async def _on_fenced(self, error: BaseException) -> None:
        self.fenced.append(error)

    async def send(self, answer: Any, *, later_s: float = 0.0) -> Any:
        self.now += later_s
        self.answer = answer
        return await self.membership.send(object())


@pytest.mark.parametrize("answer", [HeartbeatResponse(25), OffsetCommitResponse(0, 25), HeartbeatResponse(82)])
async def test_member_that_is_unknown_within_its_session_was_replaced(answer: Any) -> None:
    """The broker cannot have expired it, so another process has its name."""
    group = _Group()
    await group.send(HeartbeatResponse(0))

    with pytest.raises(BrokerError, match="another process has joined the group as instance 'w1'") as caught:
        await group.send(answer, later_s=9.9)

    assert [caught.value] == group.fenced
    assert caught.value.reason == "fenced"


@pytest.mark.parametrize("answer", [HeartbeatResponse(25), OffsetCommitResponse(25)])
async def test_member_whose_session_ended_joins_again(answer: Any) -> None:
    """It slept longer than the session timeout: the answer goes to aiokafka, which joins anew."""
    group = _Group()
    await group.send(HeartbeatResponse(0))

    assert answer is await group.send(answer, later_s=10.0)
    assert [] == group.fenced


async def test_member_frozen_before_it_read_an_answer_joins_again() -> None:
    """The good answer that it finds when it wakes up was given before its session ended."""
    group = _Group()
    group.frozen_s = 15.0
    await group.send(HeartbeatResponse(0))
    group.frozen_s = 0.0

    assert 25 == (await group.send(HeartbeatResponse(25), later_s=0.1)).error_code
    assert [] == group.fenced


async def test_join_that_needs_another_member_id_is_no_replacement() -> None:
    """The first answers of a join may be errors that aiokafka knows how to go on from."""
    group = _Group()
    await group.send(OffsetCommitResponse(0, 0))
    answer = JoinGroupResponse(25)

    assert answer is await group.send(answer)
    assert [] == group.fenced


async def test_only_answers_without_an_error_count_as_heard() -> None:
    """A rebalance in progress or a coordinator that moved says nothing of the member."""
    group = _Group()
    await group.send(HeartbeatResponse(0))
    await group.send(HeartbeatResponse(16), later_s=9.0)

    answer = HeartbeatResponse(25)

    assert answer is await group.send(answer, later_s=9.0)
