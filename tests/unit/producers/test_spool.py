"""What is kept on disk until Kafka has it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollstream.producers.memory import MemoryPublisher
from rollstream.producers.spool import Spool
from rollstream.schemas.records import CallDelivery, Delivery, RolloutStatus, Terminal


def delivery(call_id: str) -> CallDelivery:
    return CallDelivery(call_id, "r", 0, "g", Delivery.NONE, "ack_timeout", 5)


async def test_kept_records_are_written_in_order_at_the_next_start(tmp_path: Path) -> None:
    """A new process reads what an earlier one kept, and removes each file once it is acknowledged."""
    terminal = Terminal("r", 0, "g", 1, "t", RolloutStatus.FAILED, 6)
    Spool(tmp_path / "s").keep(delivery("1"))
    Spool(tmp_path / "s").keep(terminal, noun="calls")
    publisher = MemoryPublisher()

    count = Spool(tmp_path / "s").replay(publisher)
    await asyncio.sleep(0)

    assert 2 == count
    assert [("calls", delivery("1")), ("calls", terminal)] == publisher.written
    assert [] == Spool(tmp_path / "s").files()


async def test_file_stays_until_the_late_acknowledgement(tmp_path: Path) -> None:
    """Queued is not written: the file goes when the broker has answered, not before."""
    publisher, spool = MemoryPublisher(), Spool(tmp_path)
    publisher.held = True
    record = delivery("1")
    spool.remove_when_done(spool.keep(record), publisher.submit(record))
    before = len(spool.files())

    publisher.release()
    await asyncio.sleep(0)

    assert (1, 0) == (before, len(spool.files()))


async def test_damaged_file_is_set_aside_and_the_others_go_on(tmp_path: Path) -> None:
    """One unreadable file keeps no other record from Kafka, and is not thrown away."""
    publisher, spool = MemoryPublisher(), Spool(tmp_path)
    spool.keep(delivery("1"))
    (tmp_path / "00000000000000000000-000000.calls.avro").write_bytes(b"\xc3\x01rubbish")

    count = spool.replay(publisher)
    await asyncio.sleep(0)

    assert (1, [delivery("1")]) == (count, publisher.records)
    assert ["00000000000000000000-000000.calls.bad"] == [file.name for file in tmp_path.iterdir()]


async def test_record_that_the_publisher_refuses_stays_and_keeps_no_gateway_from_starting(tmp_path: Path) -> None:
    """A file that can never be written must not end every start."""
    publisher, spool = MemoryPublisher(), Spool(tmp_path)
    spool.keep(delivery("1"))
    publisher.broken = "too_large"

    count = spool.replay(publisher)

    assert (0, 1) == (count, len(spool.files()))
