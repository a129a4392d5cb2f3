"""A small world in which all is right: what clients sent and were told, and what the real stages made of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from chaos.check_group import Held, check_group, held_by
from chaos.ledger import GroupTruth, Line, group_truth
from chaos.problem import Problem, Rules
from chaos.truth import message_tokens, render, sample, text_of, to_ids
from rollstream.schemas.identity import digest_ids
from rollstream.schemas.prompts import encode_prompt
from rollstream.schemas.records import (
    CallStarted,
    Delivery,
    Encoding,
    EnvironmentEvent,
    EventKind,
    LogprobSemantics,
    ModelCall,
    Outcome,
    Record,
    RolloutOpened,
    RolloutStatus,
    SamplingParams,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json, pack_floats, pack_ids
from rollstream.sinks.stored import Evidence
from tests.unit.processors.simulation import CODEC
from tests.unit.sinks.histories import dead_letters, play, stored

START_MS = 1_790_000_000_000
LATE_MS = START_MS + 10_000_000
RULES = Rules(join_deadline_ms=600_000, group_deadline_ms=600_000)


@dataclass
class World:
    """A group being played, and its ledger."""

    size: int = 3
    group_id: str = "g1"
    entries: list[tuple[str, Record]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    now_ms: int = START_MS

    def __post_init__(self) -> None:
        members = [f"{self.group_id}-{at}" for at in range(self.size)]
        self.lines.append({"k": "group", "g": self.group_id, "n": self.size, "task": "task-1", "members": members})

    def tell(self, kind: str, ok: bool, **values: Any) -> None:
        self.now_ms += 10
        self.lines.append({"k": kind, "ok": ok, "t0": self.now_ms - 8, "t1": self.now_ms, **values})

    def judged(self) -> tuple[GroupTruth, Evidence, Held]:
        """Run the stages over it, until every deadline has passed."""
        simulation = play(self.entries, LATE_MS, LATE_MS + 60_000)
        evidence = next(one for one in stored(simulation) if one.group_id == self.group_id)
        return group_truth(self.lines), evidence, held_by(dead_letters(simulation), CODEC)


class Agent:
    """Plays one attempt. Args: number: which rollout of the group."""

    def __init__(self, world: World, number: int, attempt: int = 0) -> None:
        self.world, self.rollout_id, self.attempt = world, f"{world.group_id}-{number}", attempt
        self.tokens = message_tokens({"role": "system", "content": self.rollout_id})
        self.known: dict[str, Any] = {}
        self.count = 0
        self.is_finished = False
        self.common = {"rollout_id": self.rollout_id, "attempt": attempt, "group_id": world.group_id}
        self.name = {"r": self.rollout_id, "a": attempt}
        opened = RolloutOpened(
            **self.common, group_size=world.size, task_id="task-1", opened_at_ms=world.now_ms, policy="default"
        )
        world.entries.append(("calls", opened))
        world.tell("open", True, **self.name, g=world.group_id, n=world.size)

    def call(self, *, ok: bool = True, outcome: Outcome = Outcome.COMPLETED, max_tokens: int = 64) -> str:
        """A call. Args: ok: False where the client did not get the answer, and the gateway did not know."""
        world = self.world
        call_id = f"{self.rollout_id}-{self.attempt}-c{self.count}"
        self.tokens += message_tokens({"role": "user", "content": f"step {self.count}"})
        prompt = self.tokens + render(())
        said = sample(prompt, request_id=f"{call_id}-0", temperature=1.0, max_tokens=max_tokens, seed=None)
        tokens = said.tokens if outcome is Outcome.COMPLETED else said.tokens[:2]
        outcome = Outcome.LENGTH if outcome is Outcome.COMPLETED and said.finish_reason == "length" else outcome
        is_whole = len(tokens) == len(said.tokens)
        digest = digest_ids(pack_ids(to_ids(prompt)))
        started = CallStarted(
            **self.common,
            call_id=call_id,
            call_index=self.count,
            prompt_length_tokens=len(prompt),
            prompt_digest=digest,
            request_digest=call_id,
            started_at_ms=world.now_ms,
        )
        call = ModelCall(
            **self.common,
            call_id=call_id,
            call_index=self.count,
            protocol="openai-chat",
            adapter_version="1",
            model_requested="policy",
            model_served="policy",
            engine="vllm",
            engine_version="0.32.0",
            encoding=Encoding("t", "c", "k", "vllm"),
            sampling=SamplingParams(1.0, 1.0, -1, max_tokens),
            logprob_semantics=LogprobSemantics.PROCESSED,
            prompt=encode_prompt(to_ids(prompt), self.known),
            output_ids=pack_ids(to_ids(tokens)),
            output_logprobs=pack_floats(said.logprobs[: len(tokens)]),
            version_spans=said.spans if is_whole else (),
            policy="default",
            finish_reason=said.finish_reason if is_whole else "",
            outcome=outcome,
            delivered=Delivery.UNKNOWN if is_whole else Delivery.NONE,
            trainable=is_whole,
            defects=() if is_whole else ("not_completed",),
            request_digest=call_id,
            started_at_ms=world.now_ms,
            finished_at_ms=world.now_ms + 5,
            message=Json(orjson.dumps({"role": "assistant", "content": text_of(tokens)}).decode())
            if is_whole
            else Json("{}"),
        )
        world.entries += [("calls", started), ("calls", call)]
        told = {"id": call_id, "text": text_of(said.tokens), "finish": said.finish_reason}
        told["usage"] = [len(prompt), len(said.tokens)]
        world.tell(
            "call",
            ok,
            **self.name,
            i=self.count,
            prompt=digest,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=None,
            stream=False,
            late=self.is_finished,
            **(told if ok else dict.fromkeys(told)),
        )
        if ok:
            self.tokens += message_tokens({"role": "assistant", "content": text_of(said.tokens)})
            self.known[call_id] = to_ids(prompt + said.tokens)
        self.count += 1
        return call_id

    def event(self, call_id: str, *, times: int = 1) -> str:
        """An event after a call."""
        event_id, content = f"{call_id}-e", {"text": "ok"}
        for _ in range(times):
            event = EnvironmentEvent(
                **self.common,
                event_id=event_id,
                kind=EventKind.TOOL_RESULT,
                content=Json(orjson.dumps(content).decode()),
                at_ms=self.world.now_ms,
                call_id=call_id,
            )
            self.world.entries.append(("environment", event))
            self.world.tell("event", True, **self.name, e=event_id, content=content, call=call_id)
        return event_id

    def finish(self, reward: float | None, status: str = "succeeded", *, ok: bool = True) -> None:
        """The end."""
        outcome = {} if reward is None else {"reward": reward}
        terminal = Terminal(
            **self.common,
            group_size=self.world.size,
            task_id="task-1",
            status=RolloutStatus(status),
            finished_at_ms=self.world.now_ms,
            outcome=Json(orjson.dumps(outcome).decode()),
        )
        self.world.entries += [(noun, terminal) for noun in TERMINAL_TOPICS]
        self.world.tell("finish", ok, **self.name, status=status, reward=reward)
        self.is_finished = ok


def plain_world() -> World:
    """Three rollouts of a few calls with events, all finished in time."""
    world = World()
    for number, reward in enumerate((1.0, 0.25, -0.5)):
        agent = Agent(world, number)
        for _ in range(3):
            agent.event(agent.call())
        agent.finish(reward)
    return world


def motley_world() -> World:
    """Everything that agents do and that is no fault of the pipeline."""
    world = World(size=5)
    first = Agent(world, 0)
    first.event(first.call(), times=2)
    first.call(ok=False)
    first.call(ok=False, outcome=Outcome.CLIENT_DISCONNECTED)
    first.call(max_tokens=4)
    first.finish(1.0)
    first.finish(1.0)
    first.call()  # late
    vanished = Agent(world, 1)
    vanished.event(vanished.call())
    broken = Agent(world, 2)
    broken.call()
    again = Agent(world, 2, 1)
    again.call()
    again.finish(0.5)
    Agent(world, 3).finish(0.0, "failed")
    aborted = Agent(world, 4)
    aborted.call()
    aborted.finish(None, "aborted", ok=False)
    return world


def problems(truth: GroupTruth, evidence: Evidence, held: Held) -> list[Problem]:
    """What the comparison finds."""
    return list(check_group(truth, evidence, held, RULES))


def changed(items: list[Any], at: int, **values: Any) -> None:
    """Change an item in place."""
    items[at] = replace(items[at], **values)
