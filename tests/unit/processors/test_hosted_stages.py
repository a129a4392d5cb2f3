"""The real stages under the real shell's partition, without a broker: everything is written and let go of."""

from __future__ import annotations

from dataclasses import dataclass

from rollstream.processors.shell.partition import Partition
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import Message, to_message
from rollstream.schemas.records import GroupBuilt
from tests.source_log import source_log
from tests.unit.processors.simulation import default_pipeline


@dataclass(frozen=True)
class Logged:
    """A message as a consumer sees it."""

    offset: int
    key: bytes
    value: bytes
    timestamp: int
    headers: tuple[tuple[str, bytes], ...]


async def test_partition_drives_all_stages_to_the_end_of_the_log() -> None:
    """Source topics in, one marker a group out, and every topic's watermark at its end."""
    codec = Codec()
    logs: dict[str, list[Logged]] = {}
    partition = Partition(0, default_pipeline().build_stages(0), codec)
    partition.begin(dict.fromkeys(partition.nouns, 0), dict.fromkeys(partition.own_outputs, 0))
    for noun, record in source_log(groups=4, size=3, seed=1):
        _append(logs, noun, to_message(record, codec, prefix="rollstream", source="/test", noun=noun))
    read = dict.fromkeys(partition.nouns, 0)

    is_busy = True
    while is_busy:
        is_busy = False
        for noun in partition.nouns:
            batch = logs.get(noun, [])[read[noun] : read[noun] + 20]
            partition.feed(noun, batch)
            read[noun] += len(batch)
            partition.passed(noun, read[noun], 10)
            is_busy |= bool(batch)
        while partition.work:
            running = partition.work.popleft()
            partition.work_done(running, await running.work.run())
        while partition.outbox:
            sent = partition.outbox.popleft()
            sent.on_ack(sent, _append(logs, sent.message.topic.split(".")[1], sent.message))
            is_busy = True
        partition.tick()

    samples = [codec.decode(message.value) for message in logs["samples"]]
    assert 4 == sum(isinstance(record, GroupBuilt) for record in samples)
    assert {noun: len(log) for noun, log in logs.items()} == partition.watermarks()
    assert {0} == set(partition.held.values())


def _append(logs: dict[str, list[Logged]], noun: str, message: Message) -> int:
    log = logs.setdefault(noun, [])
    log.append(Logged(len(log), message.key, message.value, message.timestamp_ms, message.headers))
    return len(log) - 1
