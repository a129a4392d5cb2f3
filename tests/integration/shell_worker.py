"""A processor process with the fake stages: what the tests of kills start and end.

Run as `python -m tests.integration.shell_worker BOOTSTRAP PREFIX INSTANCE`.
"""

from __future__ import annotations

import logging
import sys

from rollstream.processors.shell.handler import Shell
from rollstream.processors.shell.run import run_shell
from rollstream.schemas.codec import Codec
from rollstream.settings import KafkaSettings, ProcessorSettings, Settings
from tests.unit.processors.shell.stages import Gather, Join, Relabel

NAMES = ["join", "group", "score", "reward", "credit", "build"]


def main(bootstrap: str, prefix: str, instance: str) -> None:
    """Run until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    settings = Settings(
        kafka=KafkaSettings(bootstrap=bootstrap, prefix=prefix, session_timeout_ms=6_000),
        processor=ProcessorSettings(instance_id=instance),
    )

    def make_stages(_partition: int) -> list:  # type: ignore[type-arg]
        return [
            Join(),
            Gather(),
            Relabel("score", "groups", "scores"),
            Relabel("reward", "scores", "rewards"),
            Relabel("credit", "rewards", "credits"),
            Relabel("build", "credits", "samples"),
        ]

    run_shell(settings, lambda: Shell(settings, make_stages, Codec()), NAMES)


if __name__ == "__main__":
    main(*sys.argv[1:])
