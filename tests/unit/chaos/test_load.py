"""The load against the real gateway and the stand-in engine, on sockets of the loopback address, with Kafka in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import uvicorn

import chaos.load
from chaos.check_group import check_group, held_by
from chaos.engine import Engine, serve
from chaos.ledger import LedgerFile, Line
from chaos.load import Ledger, Load, Rate
from chaos.plan import plan_group
from chaos.problem import Rules
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.memory import MemoryPublisher
from rollstream.settings import GatewaySettings
from rollstream.sinks.stored import Evidence
from tests.unit.processors.simulation import CODEC
from tests.unit.sinks.histories import dead_letters, play, stored

RULES = Rules(join_deadline_ms=600_000, group_deadline_ms=600_000)


@asynccontextmanager
async def gateway(engine_url: str, folder: Path, publisher: MemoryPublisher) -> AsyncIterator[str]:
    settings = GatewaySettings(engine_url=engine_url, key_secret="s" * 32, spool_dir=folder, engine_timeout_s=5.0)
    app = Gateway(settings, VllmEngine(settings), lambda: publisher).app
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="on"))
    # Not server.serve(), which would take the signals of the test's process.
    serving = asyncio.create_task(server._serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving
    listener.close()


async def play_load(folder: Path, publisher: MemoryPublisher) -> Line:
    """Play 120 calls over two gateways and an engine that fails now and then. Returns: the summary."""
    engine = Engine()
    server = await serve("127.0.0.1", 0, engine)
    engine_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ledger = Ledger(folder / "ledger.jsonl")
    async with (
        gateway(engine_url, folder / "a", publisher) as one,
        gateway(engine_url, folder / "b", publisher) as two,
    ):
        load = Load([one, two], ledger, seed=5, rate=1000, calls=120, agents=24, timeout_s=30)
        playing = asyncio.create_task(load.run())
        while not load.counts["answered"]:  # by then both gateways may have asked what they ask at their start
            await asyncio.sleep(0.001)
        engine.spoiled += ["error", "cut", "error"] * 2
        summary = await playing
    server.close()
    ledger.close()
    return summary


def test_what_the_gateway_writes_is_what_the_ledger_says(tmp_path: Path) -> None:
    """Agents of every kind: the comparison finds nothing, and everything is in the ledger."""
    publisher = MemoryPublisher()
    summary = asyncio.run(play_load(tmp_path, publisher))

    simulation = play(publisher.written, publisher_end_ms(publisher), publisher_end_ms(publisher) + 60_000)
    evidence = {found.group_id: found for found in stored(simulation)}
    held = held_by(dead_letters(simulation), CODEC)
    read = LedgerFile(tmp_path / "ledger.jsonl")
    truths = list(read.groups(read.group_ids()))
    found = [p for t in truths for p in check_group(t, evidence.get(t.group_id, Evidence(t.group_id)), held, RULES)]

    assert [] == found
    assert evidence.keys() <= {truth.group_id for truth in truths}
    acknowledged = sum(line["ok"] for t in truths for a in t.attempts.values() for line in a.calls)
    assert summary == read.summary
    assert (acknowledged, 0) == (summary["answered"], summary["cut_off"])
    assert 120 <= acknowledged
    assert 3 <= summary["call errors"]


def publisher_end_ms(publisher: MemoryPublisher) -> int:
    """Long after everything that was written."""
    opened_ms = [getattr(record, "opened_at_ms", 0) for record in publisher.records]
    return max(opened_ms) + 10 * RULES.join_deadline_ms


async def test_load_goes_on_when_gateways_are_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens: openings are tried again until the end, and all of it is in the ledger as not acknowledged."""
    monkeypatch.setattr(chaos.load, "_LONGEST_PAUSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    ledger = Ledger(tmp_path / "ledger.jsonl")
    load = Load([url], ledger, seed=1, rate=1000, calls=10, agents=4, timeout_s=1)
    running = asyncio.create_task(load.run())
    while load.counts["open errors"] < 20:
        await asyncio.sleep(0.01)

    load.end()
    summary = await running

    assert (0, 0) == (summary.get("answered", 0), summary["cut_off"])
    assert len(plan_group(1, 0).rollouts) == summary["rollouts gave_up"]
    lines = [orjson.loads(line) for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    assert {False} == {line["ok"] for line in lines if line["k"] == "open"}


def test_plan_follows_from_the_seed() -> None:
    """Equal seeds play equal groups, with every kind of agent among them."""
    plans = [plan_group(7, number) for number in range(300)]

    assert plans == [plan_group(7, number) for number in range(300)]
    assert plans[0] != replace(plan_group(8, 0), group_id=plans[0].group_id)
    rollouts = [rollout for plan in plans for rollout in plan.rollouts]
    assert {2, 3, 4, 6, 8} == {len(plan.rollouts) for plan in plans}
    assert {"finish", "vanish", "supersede"} == {rollout.ending for rollout in rollouts}
    assert {"succeeded", "failed", "truncated", "aborted"} == {rollout.status for rollout in rollouts}
    assert {True, False} == {not rollout.calls for rollout in rollouts}
    assert any(call.leaves_after_s for rollout in rollouts for call in rollout.calls)


async def test_rate_lets_through_no_more_than_asked() -> None:
    """After a pause at most a second's worth of tokens comes at once."""
    rate = Rate(1000)
    rate._next_s -= 60

    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for _ in range(1200):
        await rate.take()

    assert 0.15 < loop.time() - begun_s


def test_ledger_is_read_group_by_group(tmp_path: Path) -> None:
    """Lines of groups that were played at once come apart again; a line that was cut off is left out."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for group in ("g1", "g2"):
        ledger.write(k="group", g=group, n=1, members=[f"{group}-0"])
    for group, ok in (("g2", False), ("g1", True), ("g2", True)):
        ledger.write(k="open", r=f"{group}-0", a=0, g=group, ok=ok, t0=1, t1=2)
    ledger.close()
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"k": "fini')

    read = LedgerFile(tmp_path / "ledger.jsonl")
    one, two = read.groups(read.group_ids())

    assert [True] == [line["ok"] for line in one.attempts["g1-0", 0].opens]
    assert [False, True] == [line["ok"] for line in two.attempts["g2-0", 0].opens]
    assert {} == read.summary
