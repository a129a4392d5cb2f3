"""A processor process with the fake stages: what the tests of kills and failures start and end.

Run as `python -m tests.integration.shell_worker BOOTSTRAP PREFIX INSTANCE [VARIANT [SESSION_MS]]`. A variant is a worker that is
wrong or hindered on purpose:

* `bad`: a deploy whose join understands no record.
* `fixed`: a deploy whose join takes the records that are a bug for the others.
* `hold:FILE`: no rollout of partition 0 is given to the broker before the file exists.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from rollstream.errors import StageError
from rollstream.processors.base import Event, Step
from rollstream.processors.shell.handler import Shell
from rollstream.processors.shell.run import run_shell
from rollstream.processors.shell.transport import Producer
from rollstream.schemas.codec import Codec
from rollstream.settings import KafkaSettings, ProcessorSettings, Settings
from tests.unit.processors.shell.stages import Gather, Join, Relabel

NAMES = ["join", "group", "score", "reward", "credit", "build"]


class BadJoin(Join):
    """Understands nothing."""

    def apply(self, event: Event) -> Step:
        raise StageError("cannot use the record: a field is missing", reason="bad_deploy")


class FixedJoin(Join):
    """Takes what the others stumble over."""

    bug = None


JOINS: dict[str, type[Join]] = {"bad": BadJoin, "fixed": FixedJoin}


def hold_rollouts(file: Path) -> None:
    """Let no rollout of partition 0 go before the file is there."""
    send_ms = Producer.send_ms

    async def held(
        self: Producer, topic: str, key: bytes, value: bytes, partition: Any, *rest: Any
    ) -> Awaitable[Any]:
        async def later() -> Any:
            while ".rollouts." in topic and partition == 0 and not file.exists():
                await asyncio.sleep(0.05)
            return await (await send_ms(self, topic, key, value, partition, *rest))

        return asyncio.ensure_future(later())

    Producer.send_ms = held  # type: ignore[method-assign]


def main(bootstrap: str, prefix: str, instance: str, variant: str = "", session_ms: str = "6000") -> None:
    """Run until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    settings = Settings(
        kafka=KafkaSettings(bootstrap=bootstrap, prefix=prefix, session_timeout_ms=int(session_ms)),
        processor=ProcessorSettings(instance_id=instance),
    )
    if variant.startswith("hold:"):
        hold_rollouts(Path(variant.removeprefix("hold:")))

    def make_stages(_partition: int) -> list:  # type: ignore[type-arg]
        return [
            JOINS.get(variant, Join)(),
            Gather(),
            Relabel("score", "groups", "scores"),
            Relabel("reward", "scores", "rewards"),
            Relabel("credit", "rewards", "credits"),
            Relabel("build", "credits", "samples"),
        ]

    run_shell(settings, lambda: Shell(settings, make_stages, Codec()), NAMES)


if __name__ == "__main__":
    main(*sys.argv[1:])
