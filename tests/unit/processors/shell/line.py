"""All real stages of a pipeline over a Kafka in memory; their scorers run until they are told to end."""

from __future__ import annotations

from rollstream.processors.shell.hosted import Running
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import DeadLetter, GroupBuilt, Record
from tests.unit.processors.shell.log import CODEC, Log
from tests.unit.processors.simulation import default_pipeline


class Line(Log):
    """A worker with every stage."""

    def __init__(self, codec: Codec = CODEC) -> None:
        super().__init__(lambda: default_pipeline().build_stages(0), codec=codec)
        self.running: list[Running] = []
        """Scorers that have begun."""

    def go_on(self, now_ms: int) -> None:
        """Read and send until nothing moves, start what shall run, and let time pass."""
        self.now_ms = now_ms
        for _ in range(3):
            self.read_all()
            self.partition.tick()
            self.running += self.partition.work
            self.partition.work.clear()

    async def end_scorers(self) -> None:
        """The scorers that run come to an end, and so do those that waited for their turn."""
        while self.running:
            ended, self.running = self.running, []
            for running in ended:
                self.partition.work_done(running, await running.work.run())
            self.running += self.partition.work
            self.partition.work.clear()

    def records(self, noun: str) -> list[Record]:
        """What stands in a topic."""
        return [self.codec.decode(value or b"") for value in self.values(noun)]

    def reasons(self) -> list[str]:
        """Of all dead letters."""
        return [letter.reason for letter in self.records("dead-letters") if isinstance(letter, DeadLetter)]

    def built(self) -> set[str]:
        """Groups that have their samples."""
        return {record.group_id for record in self.records("samples") if isinstance(record, GroupBuilt)}
