"""A gateway over the scripted engine, `rollstream run` beside it as anybody would start it, and the audit of what it recorded."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from rollstream.cli import cli
from rollstream.processors.pipeline import load_pipeline
from rollstream.schemas.records import ModelCall, Record, Sample, Terminal
from rollstream.schemas.types import unpack_floats, unpack_mask
from rollstream.sinks.clickhouse import ClickHouseSink
from rollstream.sinks.connect import connect
from tests.contract.checkout import ROOT
from tests.contract.protocols.world import World, served_world, until
from tests.harnesses.script import Script
from tests.scripted.engine import ScriptedEngine
from tests.unit.sinks.chain import Log, run_stages

_CONTEXT_TOKENS = 400_000
"""Room for a harness's tools and instructions in a tokenizer of 600 entries."""


@dataclass
class HarnessWorld:
    """Where rollouts are run."""

    served: World
    """The gateway and its engine."""
    folder: Path
    """Below it each rollout has a folder to work in."""
    path: Path
    """Where the programs are."""
    output: dict[str, str] = field(default_factory=dict)
    """What each command said, by rollout."""

    async def run(self, rollout_id: str, *arguments: str, environment: dict[str, str] | None = None) -> int:
        """`rollstream run` in the rollout's folder, as one of a group of two. Returns: its exit code."""
        gateway = self.served.root_url.partition("/r/")[0]
        options = ["--task-id", "sum", "--gateway", gateway, "--group-id", "g-1", "--group-size", "2"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollstream", "run", *options, "--rollout-id", rollout_id, *arguments),
            cwd=self.work(rollout_id),
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(self.folder / "home"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                **(environment or {}),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        self.output[rollout_id] = said.decode(errors="replace")
        assert process.returncode is not None
        return process.returncode

    def work(self, rollout_id: str) -> Path:
        """The folder that the rollout's command runs in."""
        folder = self.folder / rollout_id
        folder.mkdir(exist_ok=True)
        return folder

    def calls(self, rollout_id: str) -> list[ModelCall]:
        """Its outcomes, in log order."""
        return [call for call in self.served.calls if call.rollout_id == rollout_id]

    def end(self, rollout_id: str) -> tuple[str, dict[str, Any]]:
        """How it ended: status and outcome."""
        found = {
            (record.status.value, record.outcome)
            for record in self.served.publisher.records
            if isinstance(record, Terminal) and record.rollout_id == rollout_id
        }
        ((status, outcome),) = found
        return status, json.loads(outcome)


@asynccontextmanager
async def harness_world(
    folder: Path, engine: ScriptedEngine, path: Path = Path(sys.executable).parent
) -> AsyncIterator[HarnessWorld]:
    """Args: path: folder of the harness's program."""
    engine.max_context_tokens = _CONTEXT_TOKENS
    settings = {"admin_port": None, "max_output_tokens": 4096}
    async with served_world(folder, "openai-chat", engine, **settings) as served:
        yield HarnessWorld(served, folder, path)


async def play_two(world: HarnessWorld, script: Script, command: tuple[str, ...]) -> None:
    """One rollout as it should be, and one where an answer is cut; each says all of its script.

    Args: command: what is run; a prompt ends it.
    """
    options = ("--timeout", "240", "--check", "grep -qx 42 answer.txt")
    for rollout_id in ("r-plain", "r-rough"):
        (world.work(rollout_id) / "notes.txt").write_text("40\n2\n")
    plain = await world.run("r-plain", *options, *command, "Add the numbers of notes.txt.")
    async with let_go(world):
        rough = await world.run("r-rough", *options, *command, "Sum the numbers of notes.txt.")

    assert (0, 1) == (plain, rough), world.output
    assert ([], []) == (script.unknown, [left for left in script.left.values() if left])


@asynccontextmanager
async def let_go(world: HarnessWorld) -> AsyncIterator[None]:
    """The engine that waits goes on once the client has the beginning of its stream."""
    engine, sent = world.served.engine, world.served.sent

    async def watch() -> None:
        await engine.is_waiting.wait()
        before = len(sent)
        await until(lambda: len(sent) > before)
        engine.go.set()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


@dataclass(frozen=True)
class Audited:
    """What became of the records."""

    report: dict[str, Any]
    """`rollstream audit --closed --json`."""
    exit_code: int
    """Its exit code."""
    advantages: dict[str, set[float]]
    """Signs of the sampled tokens' advantages, by rollout; a trainer gets no others."""

    @property
    def is_clean(self) -> bool:
        """Whether all checks hold and no call is open."""
        return self.exit_code == 0 and self.report["ok"] and self.report["open"]["calls"] == 0


def audit_records(world: World, folder: Path) -> Audited:
    """Put all records through every stage into a store, and audit that; in a process of its own, which chDB wants."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_audit, world.publisher.written, f"chdb://{folder / 'store'}").result()


def _audit(written: list[tuple[str, Record]], store: str) -> Audited:
    log = Log()
    for noun, record in written:
        log.add(noun, record)
    run_stages(log, load_pipeline(ROOT / "pipelines" / "default.yaml"))
    ClickHouseSink(connect(store)).write(log.chunks())
    done = CliRunner().invoke(cli, ["audit", "--store", store, "--closed", "--json"])
    advantages: dict[str, set[float]] = {}
    for sample in log.records["samples"]:
        if isinstance(sample, Sample):
            sampled = unpack_floats(sample.advantages)[unpack_mask(sample.mask).astype(bool)]
            advantages.setdefault(sample.rollout_id, set()).update(np.sign(sampled).tolist())
    return Audited(json.loads(done.stdout), done.exit_code, advantages)
