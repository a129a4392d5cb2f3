"""A scorer whose runs overtake each other, as those of a slow judge do."""

from __future__ import annotations

import asyncio
import random

from rollstream.schemas.records import Rollout

RNG = random.Random(0)
"""Seeded by a test: how often each run gives way to the others."""


async def races(rollout: Rollout) -> float:
    """The number of calls, sooner or later."""
    for _ in range(RNG.randrange(20)):
        await asyncio.sleep(0)
    return float(len(rollout.calls))
