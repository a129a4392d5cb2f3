"""Plays many flight desks at once, as a rollout fleet would: opens rollouts, lets the agent play, reports, finishes.

All rollouts of a group play the same desk. Groups are opened only as far ahead of the trainer as the recipe allows, so
that samples stay fresh: with `version` the version being served, group number g may start once
`g < (version + 1 + max_ahead) * groups_per_step`. Source: the staleness bound of arXiv:2505.24298.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import click
import httpx
from openai import OpenAI

from rollstream.producers import RolloutClient

from . import recipe
from .agent import play
from .desk import TOOLS, FlightDesk

_VERSION_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Played:
    """One finished rollout, as a line of the log."""

    rollout_id: str
    group: int
    version: int
    """Version that was served when the rollout began."""
    reward: int
    depth: int
    turns: int
    at_s: float
    """Seconds since the first rollout."""


class Fleet:
    """Runs groups side by side, not further ahead than allowed."""

    def __init__(self, gateway: str, seed: int, log: TextIO) -> None:
        self._rollouts = RolloutClient(gateway)
        self._http = httpx.Client(
            timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
        )
        self._seed = seed
        self._log = log
        self._log_lock = threading.Lock()
        self._version = 0
        self._began_s = time.monotonic()

    def run(self, groups: int) -> None:
        """Play so many groups; the first rollout that fails ends it all."""
        with ThreadPoolExecutor(recipe.CONCURRENT_ROLLOUTS) as threads:
            running: set[Future[None]] = set()
            for group in range(groups):
                while not self._may_start(group):
                    done, running = wait(running, _VERSION_POLL_S, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    if not running:
                        time.sleep(_VERSION_POLL_S)
                running |= {threads.submit(self._rollout, group) for _ in range(recipe.GROUP_SIZE)}
            for future in running:
                future.result()

    def _may_start(self, group: int) -> bool:
        if group >= (self._version + 1 + recipe.MAX_AHEAD) * recipe.GROUPS_PER_STEP:
            self._version = self._rollouts.stats()["policy_version"]
        return group < (self._version + 1 + recipe.MAX_AHEAD) * recipe.GROUPS_PER_STEP

    def _rollout(self, group: int) -> None:
        version = self._version
        seed = self._seed * 1_000_000 + group
        desk = FlightDesk(seed)
        rollout = self._rollouts.open_rollout(
            f"flight-desk/{seed}",
            task={"text": desk.task, "seed": seed, "depth": desk.depth},
            group_id=f"desk-{seed}",
            group_size=recipe.GROUP_SIZE,
        )
        seen: list[tuple[str, str]] = []
        client = OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, http_client=self._http)
        play(client, "policy", desk, TOOLS, lambda tool, result: seen.append((tool, result)))
        rollout.events(
            [{"kind": "tool_result", "content": {"tool": tool, "result": result}} for tool, result in seen]
        )
        rollout.finish(
            "succeeded" if desk.reward else "failed",
            {"reward": desk.reward, "depth": desk.depth, "turns": desk.turns},
        )
        at_s = round(time.monotonic() - self._began_s, 3)
        played = Played(rollout.rollout_id, group, version, desk.reward, desk.depth, desk.turns, at_s)
        with self._log_lock:
            self._log.write(json.dumps(asdict(played)) + "\n")
            self._log.flush()


@click.command()
@click.option("--gateway", required=True, help="The gateway's address.")
@click.option("--groups", type=int, required=True, help="Groups to play.")
@click.option("--seed", type=int, required=True, help="Decides the desks.")
@click.option("--log", type=click.Path(path_type=Path), required=True, help="File for a JSON line a rollout.")
def main(gateway: str, groups: int, seed: int, log: Path) -> None:
    """Play flight desks through the gateway."""
    with log.open("w", encoding="utf-8") as lines:
        Fleet(gateway, seed, lines).run(groups)


if __name__ == "__main__":
    main()
