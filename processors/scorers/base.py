"""What a scorer is, and how one is run: in time, and with every failure turned into a recorded error.

A scorer is a class with a `Config`, a `VERSION` and one method. Adding one: a file with the class, a line in
`scorers/__init__.py`, an example. Outside this package a scorer is a function, see `function.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rollstream.errors import RollstreamError, StageError, boundary
from rollstream.processors.config import Part
from rollstream.schemas.identity import canonical_json
from rollstream.schemas.records import Rollout
from rollstream.schemas.types import Json

LIMIT = 1e15
"""Largest score and weight: their squares and sums stay far from the ends of float64, and products within float32."""
_ERROR_CHARACTERS = 2_000
"""Most of an error's text that is recorded."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a scorer says about a rollout."""

    value: float | None
    """The scalar verdict; None if there is none."""
    details: object = None
    """A structured verdict: whatever JSON can hold; None for none."""


class Scorer(Protocol):
    """Scores rollouts."""

    async def score(self, rollout: Rollout) -> object:
        """Score one rollout; must not block the event loop.

        Returns: a number, or a `Verdict`. Whatever it raises is recorded as the error of a missing score.
        """


class BuiltIn(Scorer, Protocol):
    """A scorer that the pipeline file may name by kind."""

    VERSION: ClassVar[int]
    """Counted up whenever the code changes what it says."""
    Config: ClassVar[type[Part]]
    """Its knobs."""


@dataclass(frozen=True, slots=True)
class Said:
    """The outcome of one run of a scorer."""

    value: float | None = None
    """Finite, or None."""
    verdict: Json | None = None
    """The structured verdict as JSON."""
    error: str | None = None
    """Reason code (`timeout`, `raised`, `bad_value`, `no_value`), then text."""
    latency_ms: int = 0
    """How long it took."""


async def run_scorer(scorer: Scorer, rollout: Rollout, timeout_s: float) -> Said:
    """Run a scorer for at most `timeout_s`. Never raises, whatever the scorer does.

    A scorer that is over time is cancelled and not waited for, so one that ignores its cancellation holds up nobody.
    """
    began_s = time.monotonic()
    task = asyncio.ensure_future(_run(scorer, rollout))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        is_done = task.done()
        task.cancel()
    latency_ms = round((time.monotonic() - began_s) * 1000)
    if not is_done:
        return Said(error=f"timeout: nothing said in {timeout_s:g} s", latency_ms=latency_ms)
    if task.cancelled():
        return Said(error="raised: the scorer cancelled itself", latency_ms=latency_ms)
    said = task.result()
    return Said(said.value, said.verdict, said.error, latency_ms)


async def _run(scorer: Scorer, rollout: Rollout) -> Said:
    try:
        with scoring():
            return read_verdict(await scorer.score(rollout))
    except RollstreamError as error:
        reason = error.reason if error.reason in ("no_value", "bad_value") else "raised"
        return Said(error=f"{reason}: {_told(error)}")


@contextmanager
def scoring() -> Iterator[None]:
    """Turn whatever a scorer raises into a StageError, SystemExit too: a verdict does not end the process."""
    try:
        with boundary(StageError, "score", reason="raised"):
            yield
    except SystemExit as cause:
        raise StageError(f"cannot score: SystemExit: {cause}", reason="raised") from cause


def _told(error: RollstreamError) -> str:
    """The text of an error as any record can hold it: valid UTF-8, and not the size of a rollout."""
    text = str(error).removeprefix("cannot score: ")[:_ERROR_CHARACTERS]
    return text.encode("utf-8", "backslashreplace").decode()


def read_verdict(result: object) -> Said:
    """What a scorer's result says.

    Raises: StageError: reason `bad_value`: it is no finite number, or its details are no JSON.
    """
    verdict = result if isinstance(result, Verdict) else Verdict(result)  # type: ignore[arg-type]
    value: object = verdict.value
    if value is not None and not isinstance(value, int | float):
        value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if value is not None and not (isinstance(value, int | float) and -LIMIT <= value <= LIMIT):
        raise StageError(f"expected a number within +-{LIMIT:g}, got {verdict.value!r}", reason="bad_value")
    details = None
    if verdict.details is not None:
        try:
            details = Json(canonical_json(verdict.details).decode())
        except (TypeError, ValueError) as cause:
            raise StageError(f"details are no JSON: {cause}", reason="bad_value") from cause
    if value is None:
        return Said(verdict=details, error="no_value: the scorer gave none")
    return Said(float(value), details)
