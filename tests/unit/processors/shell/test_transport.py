"""Faust's and aiokafka's private parts that the transport stands on: this fails when one of them moves."""

from __future__ import annotations

import ast
import asyncio
import inspect
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.consumer.fetcher import Fetcher as AiokafkaFetcher
from aiokafka.consumer.group_coordinator import BaseCoordinator, GroupCoordinator
from aiokafka.consumer.subscription_state import Assignment, Subscription, SubscriptionState, TopicPartitionState
from faust.app import App
from faust.tables.recovery import Recovery
from faust.transport.consumer import Consumer as FaustConsumer
from faust.transport.consumer import Fetcher, ThreadDelegateConsumer
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from rollstream.errors import BrokerError
from rollstream.processors.shell.partition import Mark
from rollstream.processors.shell.transport import (
    Consumer,
    ConsumerThread,
    End,
    Fetched,
    Producer,
    Start,
    Transport,
    finished_text,
    read_finished,
)

SHELL = Path(inspect.getfile(Consumer)).parent
FOREIGN = (App, driver.Consumer, driver.AIOKafkaConsumerThread, driver.Producer, driver.Transport)


@pytest.mark.parametrize(("package", "pinned"), [("faust-streaming", "0.15.3"), ("aiokafka", "0.14.0")])
def test_pins_are_those_that_were_read(package: str, pinned: str) -> None:
    """Another version may have moved what is replaced here: read `transport.py` against it, then move the pin."""
    assert pinned == version(package)


FUNCTIONS: list[tuple[Any, list[str]]] = [
    (FaustConsumer._drain_messages, ["self", "fetcher"]),
    (FaustConsumer.force_commit, ["self", "topics", "start_new_transaction"]),
    (FaustConsumer.verify_all_partitions_active, ["self"]),
    (FaustConsumer._get_active_partitions, ["self"]),
    (driver.Consumer._new_consumer_thread, ["self"]),
    (driver.AIOKafkaConsumerThread.__post_init__, ["self"]),
    (driver.AIOKafkaConsumerThread._create_worker_consumer, ["self", "transport"]),
    (driver.AIOKafkaConsumerThread._fetch_records, ["self", "consumer", "active_partitions", "timeout", "max_records"]),
    (driver.AIOKafkaConsumerThread._ensure_consumer, ["self"]),
    (driver.Producer._settings_extra, ["self"]),
    (driver.Producer._ensure_producer, ["self"]),
    (Recovery._resume_streams, ["self", "generation_id"]),
    (App._on_partitions_revoked, ["self", "revoked"]),
    (App._on_partitions_assigned, ["self", "assigned", "generation_id"]),
    (App._crash, ["self", "reason"]),
    (driver.AIOKafkaConsumerThread.on_start, ["self"]),
    (GroupCoordinator._send_req, ["self", "request"]),
    (GroupCoordinator.fetch_committed_offsets, ["self", "partitions"]),
    (AiokafkaFetcher.fetched_records, ["self", "partitions", "timeout", "max_records"]),
]  # fmt: skip
"""What is overridden, called, or relied on in Faust and aiokafka, with its parameters."""

ATTRIBUTES: list[tuple[type, list[str]]] = [
    (
        AIOKafkaConsumer,
        [
            "_fetch_max_wait_ms",
            "_fetch_max_bytes",
            "_fetch_min_bytes",
            "_max_poll_records",
            "_coordinator",
            "_fetcher",
        ],
    ),
    (AiokafkaFetcher, ["_subscriptions"]),
    (GroupCoordinator, ["generation"]),
    (TopicPartitionState, ["highwater", "timestamp"]),
]
"""Attributes that constructors of aiokafka set."""

PROPERTIES: list[tuple[type, list[str]]] = [
    (Assignment, ["active", "tps", "state_value"]),
    (TopicPartitionState, ["position", "has_valid_position"]),
    (SubscriptionState, ["subscription"]),
    (Subscription, ["assignment"]),
]
"""Properties and methods of aiokafka's internal objects."""

INSTANCE: list[tuple[type, list[str]]] = [
    (FaustConsumer, ["_active_partitions"]),
    (ThreadDelegateConsumer, ["_thread"]),
]
"""Attributes that Faust's consumer sets or declares, and that the shell uses through its own subclasses."""


@pytest.mark.parametrize(("function", "parameters"), FUNCTIONS)
def test_replaced_and_called_functions_keep_their_parameters(function: Any, parameters: list[str]) -> None:
    """What is overridden or called exists, with these parameters."""
    assert parameters == list(inspect.signature(function).parameters)


def test_every_private_part_that_the_shell_uses_is_listed_here() -> None:
    """A private attribute of a foreign object that no test knows would move without anybody hearing of it."""
    used = _private_parts()

    listed = {function.__name__ for function, _ in FUNCTIONS}
    listed.update(name for _, names in (*ATTRIBUTES, *PROPERTIES, *INSTANCE) for name in names)
    assert set() == used - listed
    assert {"_fetch_max_wait_ms", "_ensure_consumer", "_drain_messages", "_crash", "highwater"} <= used


def _private_parts() -> set[str]:
    """Names of foreign private parts in the shell's files: underscored attributes, overrides, and what `_ends` looks at."""
    trees = [ast.parse(file.read_text("utf-8")) for file in SHELL.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    slots = {
        constant.value
        for node in nodes
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__slots__" for t in node.targets)
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant)
    }
    assigned = {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
    }
    own = {name for name in functions if not any(hasattr(base, name) for base in FOREIGN)} | assigned | slots
    private = {node.attr for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")}
    derived = [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).startswith(("driver.", "faust.")) for base in node.bases)
    ]
    overridden = {
        member.name
        for node in derived
        for member in node.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(hasattr(base, member.name) for base in FOREIGN)
    }
    internal = {
        node.attr
        for node in ast.walk(functions["_ends"])
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", "") in ("subscription", "assignment", "state")
    }
    return (private - own) | overridden | internal


def test_faust_still_drains_and_commits_through_what_is_replaced() -> None:
    """An override that nobody calls any more would hand out nothing, or let Faust commit its own offsets."""
    assert "consumer._drain_messages(self)" in inspect.getsource(Fetcher._fetcher.fun)
    assert "self.force_commit(" in inspect.getsource(FaustConsumer.commit)
    assert "stream_wait_empty" in inspect.getsource(FaustConsumer.on_stop)
    assert "self.commit()" in inspect.getsource(FaustConsumer._commit_handler.fun)
    assert "verify_all_partitions_active()" in inspect.getsource(FaustConsumer._commit_livelock_detector.fun)


def test_aiokafka_sends_what_members_send_through_what_is_watched() -> None:
    """Heartbeats and commits name no instance, so their answers are all that tells a replaced worker."""
    for function in (GroupCoordinator._do_heartbeat, GroupCoordinator._do_commit_offsets):
        assert "self._send_req(request)" in inspect.getsource(function)


def test_faust_seeks_before_it_lets_records_flow() -> None:
    """Records dropped in a rebalance are read again only because of this order."""
    source = inspect.getsource(Recovery._resume_streams)

    assert -1 < source.index("perform_seek()") < source.index("consumer.resume_flow()")
    assert "consumer.stop_flow" in inspect.getsource(App._on_partitions_revoked)


def test_generation_is_known_before_the_app_hears_of_an_assignment() -> None:
    """The generation that fetched records carry is compared with this one."""
    source = inspect.getsource(driver.ConsumerRebalanceListener.on_partitions_assigned)

    assert (
        -1 < source.index("app.consumer_generation_id = generation") < source.index("thread.on_partitions_assigned(")
    )


@pytest.mark.parametrize(("owner", "names"), ATTRIBUTES)
def test_private_attributes_are_still_set(owner: type, names: list[str]) -> None:
    """Attributes read from aiokafka's objects are assigned in their constructors."""
    source = inspect.getsource(owner.__init__)  # type: ignore[misc]

    assert [name for name in names if f"self.{name} = " not in source] == []


@pytest.mark.parametrize(("owner", "names"), PROPERTIES)
def test_private_properties_are_still_there(owner: type, names: list[str]) -> None:
    """Properties and methods read from aiokafka's objects."""
    assert [] == [name for name in names if not hasattr(owner, name)]


@pytest.mark.parametrize(("owner", "names"), INSTANCE)
def test_attributes_of_fausts_consumer_are_still_declared(owner: type, names: list[str]) -> None:
    """They are set somewhere in the class, or annotated."""
    source = inspect.getsource(owner)

    assert [] == [name for name in names if f"self.{name}" not in source and f"{name}:" not in source]


def test_fetch_limits_reach_the_fetcher() -> None:
    """They are set on the consumer between its construction and its start."""
    source = inspect.getsource(AIOKafkaConsumer.start)

    assert "fetch_max_wait_ms=self._fetch_max_wait_ms" in source
    assert "fetch_max_bytes=self._fetch_max_bytes" in source
    assert issubclass(GroupCoordinator, BaseCoordinator)
    assert {"partition", "timestamp_ms", "headers"} <= set(inspect.signature(AIOKafkaProducer.send).parameters)


def test_transport_uses_our_consumer_and_an_idempotent_producer() -> None:
    """Outputs of several records keep their order, and a retried request doubles none."""
    settings = Producer._settings_extra(SimpleNamespace(app=SimpleNamespace(is_idempotent=True)))  # type: ignore[arg-type]

    assert (Transport.Consumer, Transport.Producer) == (Consumer, Producer)
    assert settings == {"acks": "all", "enable_idempotence": True}


class _FakeConsumer:
    """The parts of aiokafka's consumer that an answer is made of."""

    def __init__(self, *, position: int, highwater: int | None, answer_ms: int) -> None:
        self.state = SimpleNamespace(
            position=position, highwater=highwater, timestamp=answer_ms, has_valid_position=True
        )
        assignment = SimpleNamespace(active=True, tps=[("t", 0)], state_value=lambda _tp: self.state)
        subscriptions = SimpleNamespace(subscription=SimpleNamespace(assignment=assignment))
        self._fetcher = SimpleNamespace(_subscriptions=subscriptions)
        self._coordinator = SimpleNamespace(generation=3)
        self._max_poll_records = 10
        self.sought: list[tuple[Any, int]] = []
        self.is_paused = True

    def assignment(self) -> set[Any]:
        return {("t", 0)}

    def paused(self) -> set[Any]:
        return {("t", 0)} if self.is_paused else set()

    def pause(self, *tps: Any) -> None:
        self.is_paused |= bool(tps)

    def resume(self, *tps: Any) -> None:
        self.is_paused &= not tps

    def seek(self, tp: Any, offset: int) -> None:
        self.sought.append((tp, offset))


def _thread(*, flow_active: bool, records: dict[Any, list[Any]]) -> Any:
    async def fetch(*_args: Any, **_: Any) -> dict[Any, list[Any]]:
        return records

    consumer = SimpleNamespace(flow_active=flow_active)
    thread = SimpleNamespace(consumer=consumer, _fetch_records=fetch, _answered={})
    thread._ends = lambda c: ConsumerThread._ends(thread, c)  # type: ignore[arg-type]
    return thread


async def test_records_that_nobody_can_take_are_handed_back() -> None:
    """A fetch that returns during a rebalance must not move the position: without a commit no seek would undo it."""
    consumer = _FakeConsumer(position=9, highwater=9, answer_ms=1)
    thread = _thread(flow_active=False, records={("t", 0): [SimpleNamespace(offset=7), SimpleNamespace(offset=8)]})

    fetched = await ConsumerThread._fetch(thread, consumer, set())

    assert fetched == Fetched(3)
    assert consumer.sought == [(("t", 0), 7)]


async def test_end_is_proven_only_by_an_answer_after_the_first() -> None:
    """A worker that was frozen reads an old answer first; what that tells was true before the one received last."""
    consumer = _FakeConsumer(position=9, highwater=9, answer_ms=100)
    thread = _thread(flow_active=True, records={})
    first = await ConsumerThread._fetch(thread, consumer, set())
    consumer.state.timestamp = 250
    second = await ConsumerThread._fetch(thread, consumer, set())
    same_answer = await ConsumerThread._fetch(thread, consumer, set())
    consumer.state.highwater = 12

    behind = await ConsumerThread._fetch(thread, consumer, set())

    assert [End(9, None), End(9, 100), End(9, 100), End(9, None, 3)] == [
        fetched.ends[TP("t", 0)] for fetched in (first, second, same_answer, behind)
    ]


@pytest.mark.parametrize(("mark", "text"), [(Mark(5, 9), "finished=9"), (Mark(9, 9), "")])
def test_what_is_finished_is_committed_beside_the_offset(mark: Mark, text: str) -> None:
    """As Kafka's commit metadata, only where it says more than the offset."""
    assert text == finished_text(mark)
    assert (mark.finished if text else 0) == read_finished(text)


@pytest.mark.parametrize("metadata", ["", None, "by somebody else", "finished=", "finished=-1"])
def test_metadata_of_others_says_nothing(metadata: str | None) -> None:
    """A tool that moves offsets writes what it likes; then every reader reads from the offset."""
    assert 0 == read_finished(metadata)


async def test_second_assignment_of_a_generation_begins_anew() -> None:
    """A static member that joins again may keep its generation; its new partitions must be told where reading starts."""
    begun: list[int] = []

    async def start_of(_own: Any) -> Start:
        return Start(3)

    handler = SimpleNamespace(
        epoch=1, own_outputs=list, begin=lambda *_: begun.append(handler.epoch), passed=lambda _: None
    )
    consumer = SimpleNamespace(
        _begun=(-1, -1), _thread=SimpleNamespace(start_of=start_of), _is_current=lambda _generation: True
    )
    await Consumer._take(consumer, handler, Fetched(3))  # type: ignore[arg-type]
    await Consumer._take(consumer, handler, Fetched(3))  # type: ignore[arg-type]

    handler.epoch = 2
    await Consumer._take(consumer, handler, Fetched(3))  # type: ignore[arg-type]

    assert [1, 2] == begun


async def test_commit_that_never_ends_stops_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on and commit nothing; a new process finds the group's coordinator."""

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    crashed: list[BaseException] = []

    async def crash(error: BaseException) -> None:
        crashed.append(error)

    consumer = SimpleNamespace(_coordinator=SimpleNamespace(generation=3), commit=never)
    thread: Any = SimpleNamespace(_ensure_consumer=lambda: consumer, crash=crash)
    monkeypatch.setattr("rollstream.processors.shell.transport._COMMIT_S", 0.01)

    assert not await ConsumerThread._commit_in(thread, 3, {TP("t", 0): Mark(1, 1)})
    assert ["no_commit"] == [error.reason for error in crashed if isinstance(error, BrokerError)]


async def test_commit_of_a_crashed_thread_fails_at_once() -> None:
    """Nobody is there to answer: a stop that asked for a last commit would wait for ever."""
    asked: list[Any] = []

    async def call_thread(*request: Any) -> bool:
        asked.append(request)
        return True

    thread: Any = SimpleNamespace(should_stop=True, call_thread=call_thread, _commit_in=None)

    assert not await ConsumerThread.commit_in(thread, 3, {TP("t", 0): Mark(1, 1)})
    assert [] == asked
