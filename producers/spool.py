"""Keeps on disk what Kafka did not acknowledge in time, until it does.

A call's outcome exists only in the gateway until the broker has it. When the broker is away the outcome stays queued in the
publisher AND is written here, so that neither a long outage nor the end of the process loses it. Acknowledged late: the file is
removed. Process ended first: the next start writes the files to Kafka, in order, before anything else. A record may so come
twice, with equal bytes; readers know a call by its `call_id` and `call_attempt`.

One file a record: `<nanoseconds>-<count>.<noun>.avro`, Avro single-object encoding, written beside and renamed, synced before
`keep` returns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from functools import partial
from pathlib import Path

from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.producers.base import Publisher
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import Record
from rollstream.schemas.topics import topic_of

_log = logging.getLogger(__name__)


class Spool:
    """A folder of records that Kafka has not acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._codec = Codec()
        self._count = itertools.count()

    def keep(self, record: Record, *, noun: str | None = None) -> Path:
        """Write a record to disk and sync it. Blocks for a disk write.

        Raises: BrokerError: reason `spool`; the disk refused.
        """
        noun = noun or topic_of(type(record)).noun
        name = f"{time.time_ns():020d}-{next(self._count):06d}.{noun}.avro"
        with boundary(BrokerError, f"keep {type(record).__name__} in {str(self.folder)!r}", reason="spool"):
            self.folder.mkdir(parents=True, exist_ok=True)
            written = self.folder / f"{name}.part"
            with written.open("wb") as file:
                file.write(self._codec.encode(record))
                file.flush()
                os.fsync(file.fileno())
            kept = written.rename(self.folder / name)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return kept

    def files(self) -> list[Path]:
        """What is kept, oldest first."""
        return sorted(self.folder.glob("*.avro"))

    def read(self, file: Path) -> tuple[str, Record]:
        """A kept record and its topic noun.

        Raises: SchemaError: the file is damaged.
        """
        return file.name.split(".")[1], self._codec.decode(file.read_bytes())

    def replay(self, publisher: Publisher) -> int:
        """Submit all that is kept, in order; each file goes when its record is acknowledged.

        A damaged file is set aside as `*.bad` and reported: it must not keep the others from Kafka. Nor must a record that the
        publisher refuses: its file stays for the next start.

        Returns: how many were submitted.
        """
        count = 0
        for file in self.files():
            try:
                noun, record = self.read(file)
            except SchemaError:
                _log.exception("cannot replay %s; it is set aside as .bad", file)
                file.rename(file.with_suffix(".bad"))
                continue
            try:
                submitted = publisher.submit(record, noun=noun)
            except BrokerError:
                _log.exception("cannot replay %s; it stays there", file)
                continue
            self.remove_when_done(file, submitted)
            count += 1
        return count

    def remove_when_done(self, file: Path, future: asyncio.Future[None]) -> None:
        """Remove a file once its record is acknowledged."""
        future.add_done_callback(partial(_remove, file))


def _remove(file: Path, future: asyncio.Future[None]) -> None:
    if not future.cancelled() and future.exception() is None:
        file.unlink(missing_ok=True)
