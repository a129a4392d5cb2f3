"""The toy world of the design notes (gateway.md §4.1): a vocabulary small enough to write every prompt by hand.

An engine that samples what a case says, a gateway around it, a client that echoes what the case says, and what join makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.processors.base import Event, Position
from rollstream.processors.pipeline import load_pipeline
from rollstream.producers.engines.base import Answer, Conversation, Ids
from rollstream.producers.memory import MemoryPublisher
from rollstream.producers.parsers import PARSERS, to_message
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms
from rollstream.schemas.prompts import common_prefix, decode_prompts
from rollstream.schemas.records import ModelCall, Record, Rollout, SamplingParams
from rollstream.schemas.types import unpack_ids
from tests.scripted.tongue import Messages, ToyTongue
from tests.unit.producers.fakes import FakeEngine, Play, Rig

P = [1, 4, 3, 29, 2, 3, 1, 5, 3]
"""The user says hi, and the assistant is to speak."""
HI = {"role": "user", "content": "hi"}
_PIPELINE = Path(__file__).parents[4] / "pipelines/default.yaml"
_CODEC = Codec()


class ThinkingTongue(ToyTongue):
    """Shows a thought while tools go on, and leaves it out once the user speaks again, as reasoning models' templates do."""

    def render(self, messages: Messages, tools: Any = None, **kwargs: Any) -> list[int]:
        last_user = max(at for at, message in enumerate(messages) if message["role"] == "user")
        return super().render(
            [
                {**message, "content": f"<think>{message['reasoning_content']}</think>{message['content']}"}
                if at > last_user and message.get("reasoning_content")
                else message
                for at, message in enumerate(messages)
            ]
        )


@dataclass
class ToyPlay(Play):
    """One answer."""

    logprobs: Sequence[float | None] | None = None
    """One each; None is `logprob` for all."""
    counted: int | None = None
    """The number of tokens that the engine says it sampled; None is the true one."""
    moves_to: int | None = None
    """The engine serves this version when it has sampled; None is the same as before."""


class ToyEngine(FakeEngine):
    """See the module."""

    def __init__(self, *plays: Play, tongue: ToyTongue | None = None) -> None:
        super().__init__(*plays)
        self.tongue = tongue or ToyTongue()

    async def render(self, conversation: Conversation) -> Ids:
        return np.array(self.tongue.render(conversation.messages), dtype=np.uint32)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        play = self.plays[0]
        await super().generate(prompt_ids, sampling, request_id, answer)
        if isinstance(play, ToyPlay):
            assert answer.finish is not None
            counted = len(answer.ids) if play.counted is None else play.counted
            answer.finish = replace(answer.finish, output_tokens=counted)
            answer.logprobs = answer.logprobs if play.logprobs is None else list(play.logprobs)
            self.version = self.version if play.moves_to is None else play.moves_to

    async def parse(
        self, conversation: Conversation, ids: list[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        return to_message(PARSERS["hermes"](self.tongue.decode(ids)), f"call_{call_id}")


async def say(rig: Rig, opened: dict[str, Any], *messages: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Send a conversation. Returns: the assistant message, as the client would echo it."""
    answer = await rig.chat(opened, messages=list(messages), **values)
    assert answer.is_success, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def finish(rig: Rig, opened: dict[str, Any]) -> None:
    """End the rollout."""
    path = opened["base_url"].removesuffix("/v1") + "/finish"
    answer = await rig.http.post(
        path, json={"status": "succeeded"}, headers={"authorization": f"Bearer {opened['api_key']}"}
    )
    assert answer.is_success, answer.text


def calls(publisher: MemoryPublisher) -> list[ModelCall]:
    """Outcomes, in log order."""
    return [record for record in publisher.records if isinstance(record, ModelCall)]


def output(call: ModelCall) -> list[int]:
    """The sampled ids."""
    return unpack_ids(call.output_ids).tolist()


def prompts(publisher: MemoryPublisher) -> list[list[int]]:
    """Whole prompts of the outcomes, from the records alone."""
    found, failed = decode_prompts(calls(publisher))
    assert {} == failed
    return [found[call.call_id].tolist() for call in calls(publisher)]


def shared(publisher: MemoryPublisher) -> tuple[int, int]:
    """How many ids the second prompt shares with the first call's (prompt ‖ output), and how many those are."""
    first, second = prompts(publisher)
    whole = np.array([*first, *output(calls(publisher)[0])], dtype=np.uint32)
    return common_prefix(whole, np.array(second, dtype=np.uint32)), len(whole)


def joined(written: Sequence[tuple[str, Record]], *, until_ms: Callable[[int], int] | None = None) -> Rollout:
    """What join makes of records in log order. Args: until_ms: time at the end, from the last record's; None has a terminal."""
    (join,) = (stage for stage in load_pipeline(_PIPELINE).build_stages(0) if stage.name == "join")
    emits = []
    for offset, (noun, record) in enumerate(written):
        event = Event(Position(noun, 0, offset), record, event_time_ms(record), _CODEC.encode(record))
        emits += join.apply(event).emits
    if until_ms is not None:
        emits += join.tick(until_ms(event_time_ms(written[-1][1]))).emits
    (emit,) = emits
    (rollout,) = emit.records
    assert isinstance(rollout, Rollout)
    return rollout
