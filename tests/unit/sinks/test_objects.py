"""The object sink: files count when a manifest names them, each offset once, whoever races or crashes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pyarrow.parquet as pq
import pytest

from rollstream.errors import SettingsError, SinkError
from rollstream.object_store import open_store
from rollstream.schemas.records import RECORDS, DeadLetter, ModelCall, Rollout, Sample
from rollstream.sinks.base import Chunk, LogRecord, SinkBusy, Source
from rollstream.sinks.objects import (
    ObjectSink,
    after,
    list_manifests,
    manifest_path,
    read_manifest,
    read_manifests,
    read_records,
)
from tests.unit.sinks.chain import Log


def _calls(log: Log) -> Chunk:
    (chunk,) = [chunk for chunk in log.chunks() if ".calls." in chunk.source.topic]
    return chunk


def _ranges(store: Any) -> list[tuple[int, int]]:
    return sorted({(file.first, file.last) for manifest in read_manifests(store) for file in manifest.files})


@pytest.mark.parametrize("record", [record for name, record in RECORDS.items() if name not in ("consumption",)])
def test_every_record_comes_back_as_it_went_in(tmp_path: Path, log: Log, record: type) -> None:
    """The files hold the whole log, nested records and NaN included."""
    store = open_store(str(tmp_path))

    ObjectSink(store).write(log.chunks())

    expected = [r for records in log.records.values() for r in records if type(r) is record]
    assert expected
    found = list(read_records(store, record))
    assert sorted(map(repr, expected)) == sorted(map(repr, found))


def test_names_follow_topic_partition_and_range(tmp_path: Path, log: Log) -> None:
    """A person finds a file from an offset."""
    chunk = _calls(log)
    store = open_store(str(tmp_path))

    ObjectSink(store).write([chunk])

    (manifest,) = read_manifests(store)
    assert {"rollout_opened", "call_started", "model_call", "call_delivery", "terminal"} == {
        f.record for f in manifest.files
    }
    for file in manifest.files:
        assert file.path.startswith(f"data/rollstream.calls.v1/0/{0:020}-{chunk.last:020}-{file.record}-")
        assert (tmp_path / file.path).stat().st_size == file.size_bytes
    assert (tmp_path / f"_manifest/{1:020}.json").exists()


def test_token_columns_are_byte_split_without_a_dictionary(tmp_path: Path, log: Log) -> None:
    """The measured encoding of ids and log-probabilities."""
    store = open_store(str(tmp_path))
    ObjectSink(store).write([_calls(log)])
    (path,) = [f.path for m in read_manifests(store) for f in m.files if f.record == "model_call"]

    metadata = pq.ParquetFile(io.BytesIO((tmp_path / path).read_bytes())).metadata.row_group(0)

    columns = {metadata.column(i).path_in_schema: metadata.column(i) for i in range(metadata.num_columns)}
    for name in ("prompt.suffix.list.element", "output_ids.list.element", "output_logprobs.list.element"):
        assert "BYTE_STREAM_SPLIT" in columns[name].encodings
        assert "RLE_DICTIONARY" not in columns[name].encodings
        assert columns[name].compression == "ZSTD"


def test_same_chunks_twice_change_nothing(tmp_path: Path, log: Log) -> None:
    """What a manifest covers is not written again."""
    store = open_store(str(tmp_path))
    ObjectSink(store).write(log.chunks())

    rows = ObjectSink(store).write(log.chunks())

    assert rows == 0
    assert [1] == list_manifests(store)


def test_position_is_after_the_last_manifest(tmp_path: Path, log: Log) -> None:
    """A new process goes on where the store ends."""
    store = open_store(str(tmp_path))
    chunks = log.chunks(10)
    sink = ObjectSink(store)
    for chunk in chunks:
        sink.write([chunk])

    positions = ObjectSink(store).positions()

    assert {chunk.source: chunk.last + 1 for chunk in chunks} == positions


def test_crash_before_the_manifest_leaves_files_that_do_not_count(tmp_path: Path, log: Log) -> None:
    """Orphans are harmless: the chunk is written again, cut differently, and each offset counts once."""
    store = open_store(str(tmp_path))
    chunk = _calls(log)

    class Crashing(ObjectSink):
        def _create(self, path: str, data: bytes) -> bool:
            if path.startswith("_manifest"):
                raise KeyboardInterrupt
            return super()._create(path, data)

    with pytest.raises(KeyboardInterrupt):
        Crashing(store).write([chunk])
    sink = ObjectSink(store)
    before = dict(sink.positions())
    sink.write([replace(chunk, last=chunk.records[9].offset, records=chunk.records[:10])])
    sink.write([replace(chunk, first=chunk.records[10].offset, records=chunk.records[10:])])

    assert {} == before
    calls = [call.call_id for call in read_records(store, ModelCall)]
    assert len(calls) == len(set(calls)) == sum(isinstance(r, ModelCall) for r in log.records["calls"])


def test_loser_of_a_race_leaves_out_what_the_winner_wrote(tmp_path: Path, log: Log) -> None:
    """Two owners of one partition, one of them a zombie: each offset is in one file that counts."""
    store = open_store(str(tmp_path))
    chunk = _calls(log)
    zombie, owner = ObjectSink(store), ObjectSink(store)
    zombie.positions()
    owner.write([replace(chunk, last=chunk.records[14].offset, records=chunk.records[:15])])

    rows = zombie.write([chunk])

    assert len(chunk.records) - 15 == rows
    assert [1, 2] == list_manifests(store)
    assert [(0, 14), (15, chunk.last)] == _ranges(store)
    ids = [call.call_id for call in read_records(store, ModelCall)]
    assert len(ids) == len(set(ids))


def test_two_partitions_race_and_both_count(tmp_path: Path) -> None:
    """The loser of a number takes the next one."""
    store = open_store(str(tmp_path))
    a, b = (Chunk(Source("t.x.v1", p), 0, 0, (LogRecord(0, b"x"),)) for p in (0, 1))
    first, second = ObjectSink(store), ObjectSink(store)
    first.positions()
    second.positions()

    first.write([a])
    second.write([b])

    assert {a.source: 1, b.source: 1} == first.positions() == second.positions()


def test_unreadable_record_is_a_dead_letter_beside_its_topic(tmp_path: Path) -> None:
    """Its bytes are kept."""
    store = open_store(str(tmp_path))

    ObjectSink(store).write([Chunk(Source("t.calls.v1", 0), 3, 3, (LogRecord(3, b"junk"),))])

    (letter,) = read_records(store, DeadLetter)
    assert (b"junk", "sink", 3) == (letter.value, letter.boundary, letter.offset)


def test_missing_number_blocks_readers(tmp_path: Path, log: Log) -> None:
    """What comes after a lost manifest may not be trusted."""
    store = open_store(str(tmp_path))
    sink = ObjectSink(store)
    for chunk in log.chunks()[:3]:
        sink.write([chunk])
    (tmp_path / manifest_path(2)).unlink()

    with pytest.raises(SinkError, match="number 2 is missing, the next one is 3"):
        list(read_manifests(store))


def test_changed_file_is_refused(tmp_path: Path, log: Log) -> None:
    """A manifest names the bytes, not only the file."""
    store = open_store(str(tmp_path))
    ObjectSink(store).write(log.chunks())
    (path,) = [f.path for m in read_manifests(store) for f in m.files if f.record == "rollout"]
    data = bytearray((tmp_path / path).read_bytes())
    data[100] ^= 1
    (tmp_path / path).write_bytes(bytes(data))

    with pytest.raises(SinkError, match="the file was changed"):
        list(read_records(store, Rollout))


def test_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    """A newer writer is not guessed at."""
    store = open_store(str(tmp_path))
    obstore.put(store, manifest_path(1), b'{"format": 99, "seq": 1, "files": [], "positions": []}')
    obstore.put(store, manifest_path(2), b"{}")

    with pytest.raises(SinkError, match="format is 99"):
        read_manifest(store, 1)
    with pytest.raises(SinkError, match="damaged"):
        read_manifest(store, 2)


def test_records_can_be_read_of_one_topic(tmp_path: Path, log: Log) -> None:
    """A terminal stands in three topics."""
    store = open_store(str(tmp_path))
    ObjectSink(store).write(log.chunks())

    one = list(read_records(store, RECORDS["terminal"], "rollstream.terminals.v1"))
    all_three = list(read_records(store, RECORDS["terminal"]))

    assert 3 * len(one) == len(all_three)


def test_chunk_after_a_position() -> None:
    """Nothing, all, or the rest."""
    chunk = Chunk(Source("t", 0), 5, 7, tuple(LogRecord(i, b"") for i in (5, 6, 7)))

    assert after(chunk, 8) is None
    assert after(chunk, 5) is chunk
    assert after(chunk, 7) == Chunk(Source("t", 0), 7, 7, (LogRecord(7, b""),))


def test_store_that_does_not_answer_is_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log) -> None:
    """The loop waits and writes the same chunks again."""
    from obstore.exceptions import GenericError

    def refuse(*_: object, **__: object) -> None:
        raise GenericError("503 slow down")

    store = open_store(str(tmp_path))
    monkeypatch.setattr(obstore, "put", refuse)

    with pytest.raises(SinkBusy, match="503"):
        ObjectSink(store).write(log.chunks()[:1])


def test_store_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log) -> None:
    """A wrong bucket or key does not pass by waiting."""
    from obstore.exceptions import GenericError

    def refuse(*_: object, **__: object) -> None:
        raise GenericError("Server returned non-2xx status code: 400 Bad Request: InvalidBucketName")

    store = open_store(str(tmp_path))
    monkeypatch.setattr(obstore, "put", refuse)

    with pytest.raises(SinkError, match=r"see sink\.objects") as caught:
        ObjectSink(store).write(log.chunks()[:1])
    assert not isinstance(caught.value, SinkBusy)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://"])
def test_address_that_is_none_says_what_is_expected(url: str) -> None:
    """The message shows both forms."""
    with pytest.raises(SettingsError, match="expected a folder or s3://BUCKET/PREFIX"):
        open_store(url)


def test_samples_are_readable_as_plain_parquet(tmp_path: Path, log: Log) -> None:
    """Any trainer reads the files without this package."""
    store = open_store(str(tmp_path))
    ObjectSink(store).write(log.chunks())
    files = [f for m in read_manifests(store) for f in m.files if f.record == "sample"]

    table = pq.read_table(tmp_path / files[0].path)

    samples = [record for record in log.records["samples"] if isinstance(record, Sample)]
    assert [sample.sample_id for sample in samples] == table.column("sample_id").to_pylist()
    assert table.schema.metadata[b"rollstream.record"] == b"sample"
    assert sum(sum(mask) for mask in table.column("mask").to_pylist()) == sum(s.sampled_tokens for s in samples)
