"""Plays a generated rollout: the real call service and protocol over a scripted engine and an in-memory log, without sockets.

`Stage` is made once for many cases. A case is a number; what was drawn for it is the same each time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.errors import ProviderError
from rollstream.producers.capability import Claims
from rollstream.producers.dialects.base import Exchange, Incoming, RequestRefused
from rollstream.producers.dialects.openai_chat import ChatCompletions
from rollstream.producers.engines.base import Answer, Conversation, Finish, Identity, Ids, LabelSpan
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.gateway.service import CallService
from rollstream.producers.gateway.ticket import Link, Served, Ticket
from rollstream.producers.memory import MemoryPublisher
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.producers.spool import Spool
from rollstream.schemas.records import (
    Delivery,
    LogprobSemantics,
    Record,
    RolloutOpened,
    RolloutStatus,
    SamplingParams,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.settings import GatewaySettings
from tests.generated.scripts import Script, draw_script, without_faults
from tests.generated.talk import TEMPLATES, Client, message_of, render
from tests.generated.truth import Attempt
from tests.unit.producers.fakes import identity

_MOST_CALLS = 6
"""Requests of one rollout; with two at once it is two more. Fewer than the gateway keeps bases for."""
_STOP_STRING = "b"


@dataclass
class Played:
    """A rollout that was played."""

    attempts: list[Attempt]
    """In the order in which they ran."""
    written: list[tuple[str, Record]]
    """Topic nouns and records, in log order."""
    names: set[str]
    """What was drawn."""


class ScriptedEngine:
    """Does what `script` says, and keeps what it did."""

    def __init__(self) -> None:
        self.what = identity()
        self.version: int | None = 0
        self.template = "plain"
        self.script = Script([[2]], [-0.5], "stop")
        self.rendered: tuple[int, ...] = ()
        self.asked: list[tuple[tuple[int, ...], str]] = []
        """Prompts and request ids of `generate`."""
        self.finish: Finish | None = None
        self.given: tuple[list[Any], list[Any]] = ([], [])
        self.is_waiting = asyncio.Event()

    async def start(self) -> None:
        """Nothing to do."""

    def identity(self) -> Identity:
        return self.what

    async def render(self, conversation: Conversation) -> Ids:
        ids = render(self.template, conversation.messages)
        self.rendered, self.given, self.finish = tuple(ids), ([], []), None
        return np.array(ids, dtype=np.uint32)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, request_id: str, answer: Answer) -> None:
        script = self.script
        self.asked.append((tuple(prompt_ids.tolist()), request_id))
        chunks = script.chunks if script.gives is None else script.chunks[: script.gives]
        for at, chunk in enumerate(chunks, 1):
            here = len(answer.ids)
            answer.ids += chunk
            answer.logprobs += script.logprobs[here : None if at == len(script.chunks) else here + len(chunk)]
            self.given = (list(answer.ids), list(answer.logprobs))
        self.version = self.version if script.moves_to is None else script.moves_to
        if script.how == "left":
            self.is_waiting.set()
            await asyncio.Event().wait()
        if script.how in ("died", "refused"):
            reason = "engine_error" if script.how == "died" else "bad_request"
            raise ProviderError("the scripted engine ends here", reason=reason)
        if script.how == "update":
            answer.pause_mode, answer.cache_cleared = "abort", True
        echoed = None if script.echo is None else np.array(script.echo(prompt_ids.tolist()), dtype=np.uint32)
        word = {"update": "abort", "stop_string": "stop"}.get(script.how, script.how)
        stop_string = _STOP_STRING if script.how == "stop_string" else None
        spans = tuple(LabelSpan(*span) for span in script.spans)
        answer.finish = self.finish = Finish(word, spans, echoed, script.counted, stop_string)

    async def parse(
        self, conversation: Conversation, ids: Sequence[int], prompt_ids: Ids, text: str, call_id: str
    ) -> dict[str, Any]:
        return message_of(ids)

    async def encode(self, text: str) -> Ids:
        raise AssertionError("no case asks for this")

    async def decode(self, ids: Sequence[int]) -> str:
        raise AssertionError("no case asks for this")

    async def load_policy(self, version: int, weights_ref: str) -> None:
        raise AssertionError("no case asks for this")

    async def health(self) -> str | None:
        return None

    async def close(self) -> None:
        """Nothing to do."""


@dataclass
class _Turn:
    """A request that has arrived."""

    ticket: Ticket
    exchange: Exchange
    body: str
    arrived: int
    is_marked: bool
    script: Script


@dataclass
class _Case:
    """What is known of a rollout while it is played."""

    rng: random.Random
    claims: Claims
    client: Client
    is_faulty: bool
    """Whether faults are drawn."""
    moment: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    changes: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body, the same for all requests."""

    def now(self) -> int:
        self.moment += 1
        return self.moment


class Stage:
    """Plays cases. Args: folder: for a spool that stays empty."""

    def __init__(self, folder: Path) -> None:
        self.publisher = MemoryPublisher()
        self._engine = ScriptedEngine()
        self._dialect = ChatCompletions()
        self._now_ms = 1_000_000
        self._service = CallService(
            GatewaySettings(key_secret="s", spool_dir=folder, ack_timeout_s=30),
            self._engine,
            self.publisher,
            memory=MemoryOfRollouts(),
            spool=Spool(folder),
            metrics=GatewayMetrics(),
            now_ms=self._clock,
        )

    async def play(self, number: int) -> Played:
        """Play one rollout. Args: number: which one."""
        case = self._begin(number)
        rng = case.rng
        for _ in range(rng.randint(1, _MOST_CALLS)):
            case.client.turn()
            messages = case.client.request()
            body = {"model": "m", "messages": messages, **case.changes}
            if rng.random() < 0.06:
                case.names.add("two at once")
                first, second = self._arrive(case, body), self._arrive(case, body)
                answers = [await self._run(case, turn) for turn in (first, second)]
                message = answers[0] or answers[1]
            else:
                message = await self._serve(case, body)
            if message is None and rng.random() < 0.7:
                case.names.add("sent again")
                message = await self._serve(case, body)
            elif message is not None and rng.random() < 0.06:
                case.names.add("asked again")
                message = await self._serve(case, body) or message
            if message is not None:
                case.client.hear(message)
        return self._end(case)

    def _begin(self, number: int) -> _Case:
        rng = random.Random(number)
        claims = Claims(f"r-{number}", 0, "g", 1, "t", "default", self._clock(), 2**53)
        case = _Case(rng, claims, Client(rng), is_faulty=rng.random() < 0.6)
        engine, template = self._engine, rng.choice(TEMPLATES)
        engine.template, engine.version, engine.asked = template, rng.choice((0, 3, 3, None)), []
        case.names.add(template)
        case.changes = {"temperature": rng.choice((1.0, 1.0, 0.7)), "stop": [_STOP_STRING]}
        semantics = rng.choice(("processed",) * 8 + (("raw", "raw", "unknown") if case.is_faulty else ()))
        engine.what = identity(
            semantics=LogprobSemantics(semantics),
            vocabulary_tokens=rng.choice((40, 40, None)),
            max_context_tokens=rng.choice((60, 500, 500)) if case.is_faulty else 500,
        )
        case.names.add(semantics)
        self.publisher.written.clear()
        opened = RolloutOpened(claims.rollout_id, 0, "g", 1, "t", claims.opened_at_ms)
        self.publisher.written.append(("calls", opened))
        return case

    def _end(self, case: _Case) -> Played:
        claims = case.claims
        terminal = Terminal(claims.rollout_id, 0, "g", 1, "t", RolloutStatus.SUCCEEDED, self._clock())
        written = [*self.publisher.written, *((noun, terminal) for noun in TERMINAL_TOPICS)]
        return Played(case.attempts, written, case.names | case.client.names)

    def _arrive(self, case: _Case, body: dict[str, Any], *, is_marked: bool = False) -> _Turn:
        values = {**body, "stream": case.rng.random() < 0.5}  # a retry may be streamed or not
        exchange = self._dialect.parse(Incoming(json.dumps(values).encode()))
        ticket = self._service.arrive(case.claims, self._dialect, exchange.request, Link(is_retry=is_marked))
        script = draw_script(case.rng, self._engine.version)
        if not case.is_faulty:
            script = script if script.how == "left" and case.rng.random() < 0.5 else without_faults(case.rng, script)
        case.names.update(script.names)
        return _Turn(ticket, exchange, json.dumps(body), case.now(), is_marked, script)

    async def _serve(self, case: _Case, body: dict[str, Any]) -> dict[str, Any] | None:
        return await self._run(case, self._arrive(case, body))

    async def _run(self, case: _Case, turn: _Turn) -> dict[str, Any] | None:
        """Serve a request. Returns: the assistant message, where the client got it whole."""
        engine, script, ticket = self._engine, turn.script, turn.ticket
        engine.script, before, asked = script, engine.version, len(engine.asked)
        engine.is_waiting.clear()
        task = asyncio.create_task(self._service.run(ticket))
        waiting = asyncio.create_task(engine.is_waiting.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not task.done():
            if case.rng.random() < 0.2 and not ticket.open_call.is_replaced:
                return await self._give_up(case, turn, task, before)
            ticket.link.is_gone = True
            task.cancel()
        served, message, sent = await _result(task), None, "no"
        if served is not None and script.how != "left" and len(engine.asked) > asked:
            sent, message = await self._send(turn, served)
        how = script.how if len(engine.asked) > asked else "overflow"
        case.attempts.append(self._attempt(case, turn, how, sent, before))
        if served is not None and how == "left":
            await self._service.not_delivered(served, Delivery.NONE)
        return message if sent == "whole" else None

    async def _give_up(
        self, case: _Case, turn: _Turn, task: asyncio.Task[Served], before: int | None
    ) -> dict[str, Any] | None:
        """The client sends it again with a retry's mark before anybody sees that it left."""
        case.names.add("marked")
        body = json.loads(turn.body)
        second = self._arrive(case, body, is_marked=True)
        if (
            not turn.ticket.open_call.is_replaced
        ):  # the checker will name it; without this the case would wait for ever
            turn.ticket.link.is_gone = True
            task.cancel()
        await _result(task)
        case.attempts.append(self._attempt(case, turn, "left", "no", before))
        return await self._run(case, second)

    async def _send(self, turn: _Turn, served: Served) -> tuple[str, dict[str, Any] | None]:
        sent = turn.script.sent
        if sent == "no":
            await self._service.not_delivered(served, Delivery.NONE)
            return sent, None
        self._service.delivering(served)
        answer = json.loads(turn.exchange.whole(served.shown()))
        if sent == "part":
            await self._service.not_delivered(served, Delivery.PARTIAL)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return sent, message

    def _attempt(self, case: _Case, turn: _Turn, how: str, sent: str, before: int | None) -> Attempt:
        engine, finish = self._engine, self._engine.finish
        ids, logprobs = engine.given
        echoed = finish.prompt_ids if finish else None
        return Attempt(
            body=turn.body,
            arrived=turn.arrived,
            ended=case.now(),
            is_marked=turn.is_marked,
            prompt=engine.rendered,
            ids=tuple(ids),
            logprobs=tuple(logprobs),
            how=how,
            spans=turn.script.spans if finish else (),
            echoed=None if echoed is None else tuple(echoed.tolist()),
            counted=finish.output_tokens if finish else None,
            versions=(before, engine.version),
            semantics=engine.what.semantics.value,
            temperature=case.changes["temperature"],
            vocabulary=engine.what.vocabulary_tokens,
            sent=sent,
        )

    def _clock(self) -> int:
        self._now_ms += 1
        return self._now_ms


async def _result(task: asyncio.Task[Served]) -> Served | None:
    try:
        return await task
    except RequestRefused:
        return None
