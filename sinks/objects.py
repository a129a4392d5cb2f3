"""Chunks to Parquet files in a folder or a bucket, and manifests that say which files count.

    data/<topic>/<partition>/<first>-<last>-<record>-<hash>.parquet     one file a record type of a chunk
    _manifest/<seq, 20 digits>.json                                     created if absent, numbered without a gap

A file counts only when a manifest names it. Of two writers that want the same number one loses: it reads what the other has
written, leaves out what is already there, and takes the next number. So each offset is in exactly one file that counts,
whoever crashed; files that no manifest names are harmless. Each manifest also holds all positions, so a start reads one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollstream.errors import RollstreamError, SinkError
from rollstream.schemas.codec import Codec, record_name
from rollstream.schemas.records import RECORDS, Record
from rollstream.sinks.base import Chunk, SinkBusy, Source
from rollstream.sinks.decode import decode_chunk
from rollstream.sinks.parquet import read_parquet, write_parquet

if TYPE_CHECKING:
    from obstore.store import ObjectStore

R = TypeVar("R", bound=Record)

FORMAT = 1
_MANIFESTS = "_manifest/"
_TRIES = 100
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = {"408", "425", "429"}  # of the 4xx, those that another try may get past


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that counts."""

    path: str
    """Where it is in the store."""
    record: str
    """Record type, for instance `model_call`."""
    topic: str
    """Topic."""
    topic_id: str
    """The broker's id of the topic."""
    partition: int
    """Partition."""
    first: int
    """First offset of the chunk that it belongs to."""
    last: int
    """Last offset of that chunk."""
    rows: int
    """Rows."""
    size_bytes: int
    """Bytes."""
    sha256: str
    """Digest of its bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One numbered manifest."""

    seq: int
    """Number, from 1."""
    files: tuple[DataFile, ...]
    """Files that count from now on."""
    positions: Mapping[Source, int]
    """All positions after it."""

    def to_json(self) -> bytes:
        """As it is stored."""
        positions = [[*source, offset] for source, offset in sorted(self.positions.items())]
        files = [asdict(file) for file in self.files]
        body = {"format": FORMAT, "seq": self.seq, "files": files, "positions": positions}
        return json.dumps(body, indent=1).encode()


class ObjectSink:
    """Writes chunks to an object store.

    Args:
        store: from `open_store`.
        codec: decodes the records.
    """

    def __init__(self, store: ObjectStore, codec: Codec | None = None) -> None:
        self._store = store
        self._codec = codec or Codec()
        self._latest = Manifest(0, (), {})

    def positions(self) -> Mapping[Source, int]:
        """The positions of the newest manifest."""
        self._refresh()
        return self._latest.positions

    def write(self, chunks: Sequence[Chunk]) -> int:
        """Store the files of the chunks, then a manifest that names them. Returns: rows that were not there yet."""
        for _ in range(_TRIES):
            wanted = [
                cut for cut in (after(chunk, self._latest.positions.get(chunk.source, 0)) for chunk in chunks) if cut
            ]
            if not wanted:
                return 0
            files = tuple(file for chunk in wanted for file in self._upload(chunk))
            positions = {**self._latest.positions, **{chunk.source: chunk.last + 1 for chunk in wanted}}
            manifest = Manifest(self._latest.seq + 1, files, positions)
            if self._create(manifest_path(manifest.seq), manifest.to_json()):
                self._latest = manifest
                return sum(file.rows for file in files)
            self._refresh()
        raise SinkBusy(
            f"cannot write a manifest: lost the race {_TRIES} times; run one objects sink a consumer group"
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _refresh(self) -> None:
        numbers = list_manifests(self._store, after_seq=self._latest.seq)
        if numbers:
            self._latest = read_manifest(self._store, numbers[-1])

    def _upload(self, chunk: Chunk) -> Iterator[DataFile]:
        by_record: dict[str, list[Any]] = {}
        keys = {record.offset: (record.key, record.time_ms) for record in chunk.records}
        for decoded in decode_chunk(chunk, self._codec):
            by_record.setdefault(record_name(type(decoded.record)), []).append(decoded)
        for record, rows in by_record.items():
            data = write_parquet(RECORDS[record], rows, keys)
            digest = hashlib.sha256(data).hexdigest()
            topic, partition, topic_id = chunk.source
            path = f"data/{topic}/{partition}/{chunk.first:020}-{chunk.last:020}-{record}-{digest[:16]}.parquet"
            self._create(path, data)  # there already: the name holds the digest, so it is the same file
            yield DataFile(
                path, record, topic, topic_id, partition, chunk.first, chunk.last, len(rows), len(data), digest
            )

    def _create(self, path: str, data: bytes) -> bool:
        """Put an object if there is none. Returns: False if there is one."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with _objects(f"create {path}"):
            try:
                obstore.put(self._store, path, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
        return True


def after(chunk: Chunk, position: int) -> Chunk | None:
    """What of a chunk lies at or after a position; None if nothing does."""
    if chunk.last < position:
        return None
    if chunk.first >= position:
        return chunk
    records = tuple(record for record in chunk.records if record.offset >= position)
    return replace(chunk, first=records[0].offset, records=records)


def manifest_path(seq: int) -> str:
    """Where a manifest is."""
    return f"{_MANIFESTS}{seq:020}.json"


def list_manifests(store: ObjectStore, after_seq: int = 0) -> list[int]:
    """Numbers of the manifests after one, in order."""
    import obstore

    with _objects("list manifests"):
        offset = manifest_path(after_seq) if after_seq else None
        pages = obstore.list(store, _MANIFESTS, offset=offset)
        names = [str(entry["path"]) for page in pages for entry in page]
    return sorted(int(name[len(_MANIFESTS) : -len(".json")]) for name in names if name.endswith(".json"))


def read_manifest(store: ObjectStore, seq: int) -> Manifest:
    """One manifest.

    Raises: SinkError: it is not there, or not one of ours.
    """
    import obstore

    with _objects(f"read {manifest_path(seq)}"):
        text = obstore.get(store, manifest_path(seq)).bytes().to_bytes()
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise SinkError(
                f"cannot read manifest {seq}: its format is {body['format']!r}, expected {FORMAT}; update rollstream",
                reason="unknown_format",
            )
        positions = {
            Source(topic, partition, topic_id): offset for topic, partition, topic_id, offset in body["positions"]
        }
        return Manifest(body["seq"], tuple(DataFile(**file) for file in body["files"]), positions)


def read_manifests(store: ObjectStore) -> Iterator[Manifest]:
    """All manifests, in order.

    Raises: SinkError: a number is missing: what comes after it may not be trusted.
    """
    for expected, seq in enumerate(list_manifests(store), start=1):
        if seq != expected:
            raise SinkError(
                f"cannot read manifests: number {expected} is missing, the next one is {seq}; restore it from a backup",
                reason="manifest_gap",
            )
        yield read_manifest(store, seq)


def read_records(store: ObjectStore, record: type[R], topic: str | None = None) -> Iterator[R]:
    """All stored records of a class, by manifest and offset.

    Args: topic: only those of this topic.
    Raises: SinkError: a file is missing or its bytes are not those that the manifest names.
    """
    import obstore

    kind = cast("type[Record]", record)
    wanted = record_name(kind)
    for manifest in read_manifests(store):
        for file in manifest.files:
            if file.record != wanted or topic not in (None, file.topic):
                continue
            with _objects(f"read {file.path}"):
                data = obstore.get(store, file.path).bytes().to_bytes()
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise SinkError(
                    f"cannot read {file.path}: its sha256 is not {file.sha256}, which manifest {manifest.seq} names; the "
                    "file was changed",
                    reason="file_changed",
                )
            yield from cast("list[R]", read_parquet(kind, data))


@contextmanager
def _objects(what: str) -> Iterator[None]:
    """Tell what the store cannot do now (`SinkBusy`) from what it will never do (`SinkError`)."""
    from obstore.exceptions import BaseError, GenericError

    try:
        yield
    except RollstreamError:
        raise
    except GenericError as cause:
        status = _STATUS.search(str(cause))
        if status is not None and status[1][0] == "4" and status[1] not in _PASSING:
            raise SinkError(
                f"cannot {what}: {str(cause)[:500]}; see sink.objects and sink.s3", reason="store_refused"
            ) from cause
        raise SinkBusy(f"cannot {what} now: {str(cause)[:500]}") from cause
    except (BaseError, OSError) as cause:
        raise SinkError(f"cannot {what}: {str(cause)[:500]}", reason="store_refused") from cause
    except (KeyError, TypeError, ValueError) as cause:
        raise SinkError(
            f"cannot {what}: {type(cause).__name__}: {cause}; the object is damaged", reason="bad_object"
        ) from cause
