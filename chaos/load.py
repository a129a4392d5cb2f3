"""Agents that play rollouts and keep the ledger of truth: `python -m chaos.load --gateways URL,URL --ledger FILE`.

What a group does follows from the seed (`plan.py`); what the gateways answer (`wire.py`) decides how often it has to try. Every
request is one line in the ledger, written when its answer, or the lack of one, is known:

    {"k": "group", "g": group, "n": size, "members": [rollout, ...]}
    {"k": "open", "r": rollout, "a": attempt, "g": group, ...}
    {"k": "call", "r", "a", "i": number of the call, "prompt": digest, "prompt_tokens", "max_tokens", "temperature", "seed",
     "stream", "late": sent after an acknowledged finish, "id": call id, "text", "finish", "usage": [prompt, output], ...}
    {"k": "event", "r", "a", "e": event id, "kind", "content", "call": call id, ...}
    {"k": "finish", "r", "a", "status", "reward", ...}
    {"k": "leave", "r", "a", "why"}       the agent is done with this attempt; `why` is `finished`, `vanished`, `superseded` or
                                          `gave_up`
    {"k": "end", ...}                     the summary

`...` are `try` (from 0), `gw` (index of the gateway), `t0`, `t1` (UTC epoch milliseconds of sending and knowing), `ok` (whether
it was acknowledged to the client), `code` (HTTP status; 0 without one) and `error`. What was acknowledged must be stored. What
was not may be, at most once, and right.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

from chaos.plan import CallPlan, GroupPlan, RolloutPlan, plan_group
from chaos.truth import message_tokens, render, to_ids
from chaos.wire import Reply, read_json, read_stream, read_whole
from rollstream.schemas.identity import digest_ids
from rollstream.schemas.types import pack_ids

_LONGEST_PAUSE_S = 4.0
_TRIES_AT_CALL = 6
_GRACE_S = 60.0
"""How long open rollouts may take to finish after the end."""
_PROGRESS_S = 5.0


class Ledger:
    """Append-only JSON lines; a line is in the file when `write` returns."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, **line: Any) -> None:
        """Append a line."""
        os.write(self._file, orjson.dumps(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Rate:
    """A token bucket. Args: per_s: tokens a second; also how many it holds at most, so that no outage is caught up."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._next_s = time.monotonic()

    async def take(self) -> None:
        """Wait for the next token."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s - 1.0) + 1 / self._per_s
        if self._next_s > now_s:
            await asyncio.sleep(self._next_s - now_s)


@dataclass(slots=True)
class Attempt:
    """An attempt of a rollout as its agent sees it."""

    plan: RolloutPlan
    group: GroupPlan
    number: int
    key: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: bytearray = field(default_factory=bytearray)
    """The messages as prompt tokens."""
    is_finished: bool = False
    """Its finish was acknowledged."""

    def add(self, role: str, content: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content})
        self.tokens += message_tokens(self.messages[-1])

    @property
    def path(self) -> str:
        """Below a gateway's address."""
        return f"/r/{self.plan.rollout_id}/a/{self.number}"

    @property
    def name(self) -> dict[str, Any]:
        """How the ledger names it."""
        return {"r": self.plan.rollout_id, "a": self.number}


class Load:
    """Plays groups until enough calls were answered.

    Args:
        gateways: their addresses.
        agents: most rollouts at once.
        timeout_s: how long a client waits for an answer.
    """

    def __init__(
        self,
        gateways: Sequence[str],
        ledger: Ledger,
        *,
        seed: int,
        rate: float,
        calls: int,
        agents: int = 64,
        timeout_s: float = 20.0,
    ) -> None:
        self._gateways = [url.rstrip("/") for url in gateways]
        self._ledger = ledger
        self._seed = seed
        self._rate = Rate(rate)
        self._wanted = calls
        self._agents = agents
        self._timeout_s = timeout_s
        self._ending = asyncio.Event()
        self.counts: Counter[str] = Counter()
        """Requests, answers and rollouts by kind."""

    def end(self) -> None:
        """Start no more groups and calls; finish what is open."""
        self._ending.set()

    async def run(self) -> dict[str, Any]:
        """Play. Returns: the summary, which is the ledger's last line."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=3.0)
        connector = aiohttp.TCPConnector(limit=0, use_dns_cache=False)
        began_s = time.monotonic()
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            self._http = http
            progress = asyncio.create_task(self._tell_progress())
            left = await self._play()
            progress.cancel()
        summary = {"k": "end", **self.counts, "seconds": round(time.monotonic() - began_s, 1), "cut_off": left}
        self._ledger.write(**summary)
        return summary

    async def _play(self) -> int:
        """Keep as many groups going as there are agents for. Returns: groups that had to be cut off at the end."""
        running: set[asyncio.Task[Any]] = set()
        busy = 0
        number = 0
        ending = asyncio.create_task(self._ending.wait())
        while not self._ending.is_set():
            group = plan_group(self._seed, number)
            if running and busy + len(group.rollouts) > self._agents:
                done, _ = await asyncio.wait({*running, ending}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ending}:
                    task.result()
                    busy -= int(task.get_name())
                    running.discard(task)
                continue
            number += 1
            busy += len(group.rollouts)
            running.add(asyncio.create_task(self._play_group(group), name=str(len(group.rollouts))))
            await asyncio.sleep(0)
        ending.cancel()
        if not running:
            return 0
        done, late = await asyncio.wait(running, timeout=_GRACE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()
        return len(late)

    async def _play_group(self, group: GroupPlan) -> None:
        members = [plan.rollout_id for plan in group.rollouts]
        self._ledger.write(k="group", g=group.group_id, n=len(members), task=group.task_id, members=members)
        self.counts["groups"] += 1
        await asyncio.gather(*(self._play_rollout(group, plan) for plan in group.rollouts))

    async def _play_rollout(self, group: GroupPlan, plan: RolloutPlan) -> None:
        attempt = Attempt(plan, group, 0)
        why = await self._play_attempt(attempt, is_cut=plan.ending == "supersede")
        self._ledger.write(k="leave", **attempt.name, why=why, t1=_now_ms())
        if why == "superseded":
            attempt = Attempt(plan, group, 1)
            why = await self._play_attempt(attempt, is_cut=False)
            self._ledger.write(k="leave", **attempt.name, why=why, t1=_now_ms())
        self.counts[f"rollouts {why}"] += 1

    async def _play_attempt(self, attempt: Attempt, *, is_cut: bool) -> str:
        """Play one attempt. Returns: why the agent left it."""
        plan = attempt.plan
        if not await self._open(attempt):
            return "gave_up"
        attempt.add("system", f"You are agent {plan.rollout_id} at {attempt.group.task_id}.")
        stop_at = (len(plan.calls) + 1) // 2 if is_cut or plan.ending == "vanish" else None
        for number, call in enumerate(plan.calls[:stop_at]):
            if self._ending.is_set():
                break
            answer = await self._call(attempt, number, call)
            if answer is None:  # the harness gives up on its agent, and starts another or reports a failure
                if attempt.number == 0 and not self._ending.is_set():
                    return "superseded"
                return await self._finish(attempt, "aborted", None)
            await self._tell_events(attempt, number, call, answer["id"])
        if is_cut:
            return "superseded"
        if plan.ending == "vanish":
            return "vanished"
        why = await self._finish(attempt, plan.status, plan.reward)
        if why == "finished" and plan.finishes_twice:
            await self._finish(attempt, plan.status, plan.reward)
        if why == "finished" and plan.calls_late and plan.calls:
            await self._call(attempt, len(plan.calls), plan.calls[0])
        return why

    # ---------------------------------------------------------------- requests

    async def _open(self, attempt: Attempt) -> bool:
        plan, group = attempt.plan, attempt.group
        body = {
            "task_id": group.task_id,
            "task": {"group": group.group_id},
            "group_id": group.group_id,
            "group_size": len(group.rollouts),
            "rollout_id": plan.rollout_id,
            "attempt": attempt.number,
        }
        line = {"k": "open", **attempt.name, "g": group.group_id, "n": len(group.rollouts)}
        reply = await self._until_acknowledged(line, "/rollouts", body, "")
        attempt.key = reply["api_key"] if reply is not None else ""
        return reply is not None

    async def _call(self, attempt: Attempt, number: int, call: CallPlan) -> Any:
        """One call, asked again as an OpenAI client does. Returns: the answer, or None after all tries."""
        attempt.add("user", call.say)
        body: dict[str, Any] = {
            "model": "policy",
            "messages": attempt.messages,
            "temperature": attempt.plan.temperature,
            "max_tokens": call.max_tokens,
            "stream": call.is_stream,
        }
        if call.seed is not None:
            body["seed"] = call.seed
        prompt = bytes(attempt.tokens) + render(())
        line = {
            "k": "call",
            **attempt.name,
            "i": number,
            "prompt": digest_ids(pack_ids(to_ids(prompt))),
            "prompt_tokens": len(prompt),
            "max_tokens": call.max_tokens,
            "temperature": attempt.plan.temperature,
            "seed": call.seed,
            "stream": call.is_stream,
            "late": attempt.is_finished,
        }
        data = orjson.dumps(body)
        url = f"{attempt.path}/v1/chat/completions"
        read = read_stream if call.is_stream else read_whole
        for tries in range(_TRIES_AT_CALL):
            await self._rate.take()
            leaves_after_s = call.leaves_after_s if tries == 0 else None
            reply = await self._try(line, tries, url, data, attempt.key, read, leaves_after_s)
            if reply.ok:
                answer = reply.values
                self.counts["answered"] += 1
                attempt.add("assistant", answer["text"])
                if self.counts["answered"] >= self._wanted:
                    self.end()
                return answer
            if reply.is_refused:
                return None
            if leaves_after_s is None:
                await self._pause(tries)
        return None

    async def _tell_events(self, attempt: Attempt, number: int, call: CallPlan, call_id: str) -> None:
        events = [
            {
                "event_id": f"{attempt.plan.rollout_id}-{attempt.number}-{number}-{at}",
                "kind": "tool_result",
                "content": {"text": call.say, "at": at},
                "call_id": call_id,
            }
            for at in range(call.events)
        ]
        for event in events:
            line = {
                "k": "event",
                **attempt.name,
                "e": event["event_id"],
                "content": event["content"],
                "call": call_id,
            }
            for _ in range(2 if call.repeats_event else 1):
                await self._until_acknowledged(line, f"{attempt.path}/events", event, attempt.key)

    async def _finish(self, attempt: Attempt, status: str, reward: float | None) -> str:
        outcome = {} if reward is None else {"reward": reward}
        line = {"k": "finish", **attempt.name, "status": status, "reward": reward}
        body = {"status": status, "outcome": outcome}
        if await self._until_acknowledged(line, f"{attempt.path}/finish", body, attempt.key) is None:
            return "gave_up"
        attempt.is_finished = True
        return "finished"

    async def _until_acknowledged(self, line: dict[str, Any], path: str, body: Any, key: str) -> Any:
        """Send the same again until it is acknowledged. Returns: the answer; None if it is refused, or after the end."""
        data = orjson.dumps(body)
        tries = 0
        while True:
            reply = await self._try(line, tries, path, data, key, read_json, None)
            if reply.ok or reply.is_refused or (self._ending.is_set() and tries >= _TRIES_AT_CALL):
                return reply.values
            await self._pause(tries)
            tries += 1

    async def _try(
        self,
        line: dict[str, Any],
        tries: int,
        path: str,
        data: bytes,
        key: str,
        read: Callable[[aiohttp.ClientResponse, Reply], Awaitable[None]],
        leaves_after_s: float | None,
    ) -> Reply:
        """One HTTP request, and its line in the ledger."""
        at = (hash_of(line["r"]) + tries) % len(self._gateways)
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        reply = Reply()
        began_ms = _now_ms()
        try:
            async with asyncio.timeout(leaves_after_s):
                async with self._http.post(self._gateways[at] + path, data=data, headers=headers) as response:
                    reply.code = response.status
                    await read(response, reply)
        except TimeoutError:
            reply.error = "left" if leaves_after_s is not None else "timeout"
        except aiohttp.ClientError as error:
            reply.error = f"{type(error).__name__}: {error}"[:200]
        except asyncio.CancelledError:
            self._write(line, tries, at, began_ms, Reply(reply.code, None, "cut off at the end"))
            raise
        self._write(line, tries, at, began_ms, reply)
        return reply

    def _write(self, line: dict[str, Any], tries: int, at: int, began_ms: int, reply: Reply) -> None:
        kind = line["k"]
        self.counts[f"{kind} requests"] += 1
        if not reply.ok:
            self.counts[f"{kind} errors"] += 1
        more = (
            {"id": None, "text": None, "finish": None, "usage": None, **(reply.values or {})}
            if kind == "call"
            else {}
        )
        self._ledger.write(
            **line,
            **more,
            **{"try": tries},
            gw=at,
            t0=began_ms,
            t1=_now_ms(),
            ok=reply.ok,
            code=reply.code,
            error=reply.error,
        )

    async def _pause(self, tries: int) -> None:
        await asyncio.sleep(min(0.2 * 2**tries, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            print(orjson.dumps({"at_ms": _now_ms(), **self.counts}).decode(), flush=True)


def hash_of(name: str) -> int:
    """A number that spreads names; the same in every process."""
    return sum(name.encode())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    ledger = Ledger(options.ledger)
    load = Load(
        options.gateways.split(","),
        ledger,
        seed=options.seed,
        rate=options.rate,
        calls=options.calls,
        agents=options.agents,
        timeout_s=options.timeout_s,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, load.end)
    summary = await load.run()
    ledger.close()
    return summary


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m chaos.load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gateways", required=True, help="addresses, separated by commas")
    parser.add_argument("--ledger", type=Path, required=True, help="file that the lines are appended to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100.0, help="most call requests a second")
    parser.add_argument("--calls", type=int, default=10_000, help="ends after this many answered calls")
    parser.add_argument("--agents", type=int, default=64, help="most rollouts at once")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="how long a client waits for an answer")
    print(orjson.dumps(uvloop.run(_run(parser.parse_args(arguments)))).decode(), flush=True)


if __name__ == "__main__":
    main()
