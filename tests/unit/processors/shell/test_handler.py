"""All partitions of a process, its outbox, its metrics and its security settings; no Kafka."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP
from prometheus_client import CollectorRegistry

from rollstream.errors import BrokerError, SettingsError
from rollstream.processors.base import Stage, Work
from rollstream.processors.shell.admission import partition_of
from rollstream.processors.shell.handler import Shell
from rollstream.processors.shell.metrics import ShellCollector
from rollstream.processors.shell.security import broker_credentials
from rollstream.processors.shell.transport import End
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import draft_message, to_message
from rollstream.schemas.records import Record
from rollstream.settings import Settings
from tests.memory_claims import MemoryClaims
from tests.unit.processors.shell.log import CODEC, Message
from tests.unit.processors.shell.stages import SOURCES, Gather, Join, ended, observed, opened

NOUNS = (*SOURCES, "rollouts")


class _Producer:
    """Takes messages; acknowledges when told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.acks: list[asyncio.Future[Any]] = []

    async def send_ms(self, *message: Any) -> asyncio.Future[Any]:
        self.sent.append(message)
        self.acks.append(asyncio.get_running_loop().create_future())
        return self.acks[-1]


def _shell(stages: Any = lambda _partition: [Join()]) -> Shell:
    return Shell(Settings(), stages, CODEC)


def _tps(*partitions: int, nouns: tuple[str, ...] = NOUNS) -> set[TP]:
    return {TP(f"rollstream.{noun}.v1", partition) for noun in nouns for partition in partitions}


def _assign(shell: Shell, *partitions: int, nouns: tuple[str, ...] = NOUNS) -> None:
    tps = _tps(*partitions, nouns=nouns)
    shell.assigned(tps, {tp.topic: 6 for tp in tps})
    shell.begin(dict.fromkeys(tps, 0), dict.fromkeys(tps, 0))
    shell.passed(dict.fromkeys(tps, End(0, 1)))


def _feed(shell: Shell, noun: str, records: list[Record], *, partition: int = 0) -> None:
    messages = [to_message(record, CODEC, prefix="rollstream", source="/t", noun=noun) for record in records]
    shell.feed(
        TP(f"rollstream.{noun}.v1", partition),
        [Message(at, m.timestamp_ms, m.key, m.value) for at, m in enumerate(messages)],
    )


def _group_in(partition: int) -> str:
    return next(name for name in map("g{}".format, range(100)) if partition_of(name.encode(), 6) == partition)


def _feed_rollout(shell: Shell, partition: int = 0) -> None:
    group = _group_in(partition)
    _feed(shell, "calls", [opened("r1", group=group), ended("r1", group=group)], partition=partition)
    for noun in ("environment", "terminals"):
        _feed(shell, noun, [ended("r1", group=group)], partition=partition)


async def test_topics_read_are_inputs_and_outputs() -> None:
    """Every worker of a group subscribes to the same topics: all that its stages read and write."""
    assert list(NOUNS) == list(_shell().topic_of)


@pytest.mark.parametrize(
    ("tps", "counts"),
    [
        (_tps(0, 1) - {TP("rollstream.calls.v1", 1)}, {}),
        (_tps(0, 1), {"rollstream.calls.v1": 12, "rollstream.rollouts.v1": 6}),
    ],
)
async def test_assignment_that_is_not_copartitioned_is_refused(tps: set[TP], counts: dict[str, int]) -> None:
    """Different partition numbers or counts: a rollout's events would lie with different workers."""
    with pytest.raises(BrokerError, match="partitions differ"):
        _shell().assigned(tps, counts)


async def test_worker_without_partitions_waits() -> None:
    """More workers than partitions is no error."""
    shell = _shell()

    _assign(shell)

    assert shell.offsets() == {}


async def test_output_goes_to_the_partition_of_its_inputs() -> None:
    """With key, event time and headers; and it is committed in one map with its inputs once acknowledged."""
    shell, producer = _shell(), _Producer()
    _assign(shell, 0, 4)
    _feed_rollout(shell, partition=4)
    sender = asyncio.ensure_future(shell.outbox.send_all(producer))  # type: ignore[arg-type]
    while not producer.acks:
        await asyncio.sleep(0)

    producer.acks[0].set_result(SimpleNamespace(offset=0))
    await asyncio.sleep(0)
    sender.cancel()

    [(topic, key, _value, partition, time_ms, headers)] = producer.sent
    assert ("rollstream.rollouts.v1", _group_in(4).encode(), 4, 2_000) == (topic, key, partition, time_ms)
    assert dict(headers)["rs_used"] == b'{"calls":1,"environment":0,"terminals":0}'
    assert {tp.topic.split(".")[1]: mark.offset for tp, mark in shell.offsets().items() if tp.partition == 4} == {
        "calls": 2, "environment": 1, "terminals": 1, "rollouts": 0,
    }  # fmt: skip


async def test_offsets_are_told_until_they_are_committed_and_always_whole() -> None:
    """One moved watermark brings all of its partition number, so that no own output outruns its inputs."""
    shell = _shell()
    _assign(shell, 0, 1)
    shell.committed(shell.offsets())
    before = shell.offsets()

    shell.passed({TP("rollstream.calls.v1", 1): End(5, None)})

    assert before == {}
    assert _tps(1) == set(shell.offsets())


async def test_full_outbox_stops_reading_until_acknowledgements_come() -> None:
    """Messages ahead of the broker are bounded; reading waits."""
    shell, producer = _shell(), _Producer()
    _assign(shell, 0)
    _feed_rollout(shell)
    [outgoing] = list(shell.outbox._waiting)
    shell.outbox.add([outgoing] * 1_999)
    sender = asyncio.ensure_future(shell.outbox.send_all(producer))  # type: ignore[arg-type]
    while len(producer.acks) < 2_000:
        await asyncio.sleep(0)
    before = shell.has_room

    producer.acks[0].set_result(SimpleNamespace(offset=0))
    await asyncio.wait_for(shell.room(), 5)
    sender.cancel()

    assert (False, True) == (before, shell.has_room)


def _large(shell_codec: Codec, name: str, group: str) -> Message:
    event = observed("r1", name * 500, group=group)
    message = to_message(event, shell_codec, prefix="rollstream", source="/t", noun="environment")
    assert shell_codec.is_claim(message.value)
    return Message(0, message.timestamp_ms, message.key, message.value)


async def _turns() -> None:
    """Let everything happen that needs nobody else."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_large_record_is_read_without_blocking_and_in_its_place() -> None:
    """While its claim is on the way the loop is free; what comes behind it in its partition waits, and nothing is lost."""
    claims, group = MemoryClaims(), _group_in(0)
    codec = Codec(claims=claims, inline_bytes=300)
    stage = Join()
    shell = Shell(Settings(), lambda _partition: [stage], codec)
    _assign(shell, 0)
    small = to_message(observed("r1", "a", group=group), codec, prefix="rollstream", source="/t")
    messages = [
        Message(0, 1, small.key, small.value),
        replace(_large(codec, "b", group), offset=1),
        replace(_large(codec, "c", group), offset=2),
        Message(3, 1, small.key, small.value),
    ]
    claims.is_slow = asyncio.Event()

    taking = asyncio.ensure_future(shell.take(TP("rollstream.environment.v1", 0), messages))
    await _turns()
    before = [event.content[1] for event in stage.open["r1/0"].events]
    claims.is_slow.set()
    await asyncio.wait_for(taking, 5)

    assert ["a"] == before
    assert ["a", "b", "c", "a"] == [event.content[1] for event in stage.open["r1/0"].events]


async def test_records_behind_a_claim_are_not_taken_after_a_revocation() -> None:
    """They belong to whoever has the partition next."""
    claims, group = MemoryClaims(), _group_in(0)
    codec = Codec(claims=claims, inline_bytes=300)
    stage = Join()
    shell = Shell(Settings(), lambda _partition: [stage], codec)
    _assign(shell, 0)
    large = _large(codec, "b", group)
    claims.is_slow = asyncio.Event()

    taking = asyncio.ensure_future(shell.take(TP("rollstream.environment.v1", 0), [large]))
    await _turns()
    shell.revoked()
    claims.is_slow.set()
    await asyncio.wait_for(taking, 5)

    assert {} == stage.open


async def test_claim_is_stored_before_its_message_and_what_follows_waits() -> None:
    """In the order in which they were made; the loop is free meanwhile."""
    claims, producer = MemoryClaims(), _Producer()
    codec = Codec(claims=claims, inline_bytes=300)
    shell = Shell(Settings(), lambda _partition: [Join()], codec)
    _assign(shell, 0)
    group = _group_in(0)
    claims.is_slow = asyncio.Event()
    for rollout, text in (("r1", "x" * 500), ("r2", "")):
        for noun in SOURCES:
            event = [observed(rollout, text, group=group)] if noun == "environment" and text else []
            records = [*event, ended(rollout, group=group)]
            messages = [draft_message(r, codec, prefix="rollstream", source="/t", noun=noun) for r in records]
            for message in messages:
                if message.claim is not None:
                    claims.stored[message.claim.name] = message.claim.data
            tp = TP(f"rollstream.{noun}.v1", 0)
            at = shell._partitions[0]._ledgers[noun].next_offset or 0
            claims.is_slow.set()
            await shell.take(tp, [Message(at + i, 1, m.key, m.value) for i, m in enumerate(messages)])
            claims.is_slow.clear()
    inputs = len(claims.stored)
    sender = asyncio.ensure_future(shell.outbox.send_all(producer))  # type: ignore[arg-type]

    await _turns()
    before = len(producer.sent), len(claims.stored) - inputs
    claims.is_slow.set()
    while len(producer.sent) < 2:
        await asyncio.sleep(0)
    sender.cancel()

    assert (0, 0) == before
    assert ["r1", "r2"] == [codec.decode(sent[2]).rollout_id for sent in producer.sent]  # type: ignore[union-attr]
    assert [True, False] == [codec.is_claim(sent[2]) for sent in producer.sent]


async def test_message_the_broker_refuses_ends_the_process() -> None:
    """A lost output is never passed over."""
    shell, producer, failures = _shell(), _Producer(), []
    shell.on_failure = failures.append
    _assign(shell, 0)
    _feed_rollout(shell)
    sender = asyncio.ensure_future(shell.outbox.send_all(producer))  # type: ignore[arg-type]
    while not producer.acks:
        await asyncio.sleep(0)

    producer.acks[0].set_exception(OSError("gone"))
    await asyncio.sleep(0)
    sender.cancel()

    assert ["no_ack"] == [failure.reason for failure in failures]
    assert shell.offsets()[TP("rollstream.calls.v1", 0)].offset == 0


async def test_revocation_forgets_partitions_messages_and_work() -> None:
    """Nothing of an earlier assignment is sent, committed or run on."""
    begun = asyncio.Event()

    async def _endless() -> object:
        begun.set()
        return await asyncio.get_running_loop().create_future()

    stages: list[Stage] = [Join(), Gather(lambda rollout: Work(rollout.rollout_id, _endless))]
    shell = _shell(lambda _partition: stages)
    _assign(shell, 0, nouns=(*NOUNS, "groups"))
    _feed_rollout(shell)
    [outgoing] = list(shell.outbox._waiting)
    shell.feed(TP("rollstream.rollouts.v1", 0), [Message(0, 1, b"g", outgoing.message.value)])
    await asyncio.wait_for(begun.wait(), 5)
    [work] = list(shell._works)

    shell.revoked()
    await asyncio.wait([work], timeout=5)

    assert work.cancelled()
    assert (0, {}) == (len(shell.outbox._waiting), shell.offsets())


async def test_work_that_raises_ends_the_process() -> None:
    """The contract is that an error is a result; anything else is a bug, and is not passed over."""

    async def _broken() -> object:
        raise ZeroDivisionError

    failures: list[BaseException] = []
    shell = _shell(lambda _partition: [Join(), Gather(lambda rollout: Work(rollout.rollout_id, _broken))])
    shell.on_failure = failures.append
    _assign(shell, 0, nouns=(*NOUNS, "groups"))
    _feed_rollout(shell)
    [outgoing] = list(shell.outbox._waiting)

    shell.feed(TP("rollstream.rollouts.v1", 0), [Message(0, 1, b"g", outgoing.message.value)])
    await asyncio.wait(list(shell._works), timeout=5)
    await asyncio.sleep(0)

    assert ["ZeroDivisionError"] == [type(failure).__name__ for failure in failures]


async def test_metrics_tell_what_is_held_and_how_far_behind() -> None:
    """The numbers an operator needs: held events, their age, lag, dead letters by reason."""
    shell = _shell()
    _assign(shell, 0)
    _feed(shell, "calls", [opened("r1", group=_group_in(0), at_ms=1_000)])
    shell.feed(TP("rollstream.environment.v1", 0), [Message(0, 1, b"g", b"junk")])
    shell._ticked_at = float("-inf")
    shell.passed({TP("rollstream.calls.v1", 0): End(1, None, lag=7)})
    registry = CollectorRegistry()
    registry.register(ShellCollector(shell))

    def told(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rollstream_processor_{name}", labels)

    assert told("held_events", topic="calls", partition="0") == 1
    assert told("lag_events", topic="calls", partition="0") == 7
    assert told("dead_letters_total", boundary="decode", reason="unknown_framing") == 1
    assert (told("oldest_held_age_seconds", partition="0") or 0) > 1e6
    assert told("partitions") == 1


def test_plaintext_needs_no_credentials() -> None:
    """Properties that are not about security are left to the clients that know them."""
    assert broker_credentials({"linger.ms": "5"}) is None


def test_sasl_properties_become_faust_credentials() -> None:
    """One setting serves librdkafka and Faust."""
    properties = {
        "security.protocol": "sasl_ssl", "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "u", "sasl.password": "p",
    }  # fmt: skip

    made = broker_credentials(properties)

    assert ("u", "p", "SCRAM-SHA-512", "SASL_SSL") == (
        made.username, made.password, made.mechanism.value, made.protocol.value,
    )  # fmt: skip


@pytest.mark.parametrize(
    "properties",
    [
        {"security.protocol": "tls"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.username": "u"},
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "GSSAPI",
            "sasl.username": "u",
            "sasl.password": "p",
        },
    ],
)
def test_security_that_faust_does_not_speak_is_refused(properties: dict[str, str]) -> None:
    """At start, naming the property; not as a worker that never connects."""
    with pytest.raises(SettingsError, match=r"kafka\.properties"):
        broker_credentials(properties)


async def test_own_outputs_are_read_first() -> None:
    """What a worker re-reads at a start is not held, nor built again, where its outputs show it to be done."""
    shell = _shell()
    tps = _tps(0, 1)
    shell.assigned(tps, {tp.topic: 6 for tp in tps})
    own = {tp for tp in tps if "rollouts" in tp.topic}
    before = shell.wanted(tps)
    shell.begin(dict.fromkeys(tps, 0), {TP("rollstream.rollouts.v1", 0): 0, TP("rollstream.rollouts.v1", 1): 7})

    shell.passed({tp: End(0, 1) for tp in own})

    assert own == before
    assert _tps(0) | {TP("rollstream.rollouts.v1", 1)} == shell.wanted(tps)


async def test_large_messages_fill_the_outbox_early() -> None:
    """What is ahead of the broker is bounded in bytes as well: two thousand rollouts may be gigabytes."""
    shell, producer = _shell(), _Producer()
    _assign(shell, 0)
    _feed_rollout(shell)
    [outgoing] = list(shell.outbox._waiting)
    large = replace(outgoing, message=replace(outgoing.message, value=bytes(8_000_000)))
    shell.outbox.add([large] * 6)
    sender = asyncio.ensure_future(shell.outbox.send_all(producer))  # type: ignore[arg-type]
    while len(producer.acks) < 5:
        await asyncio.sleep(0)
    before = shell.has_room, len(producer.sent)

    for ack in producer.acks[1:5]:
        ack.set_result(SimpleNamespace(offset=0))
    await asyncio.wait_for(shell.room(), 5)
    sender.cancel()

    assert (False, 5) == before
