"""What the processor process refuses before it starts, the loop it runs on, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from rollstream.errors import BrokerError, SettingsError
from rollstream.processors.shell import run as process
from rollstream.processors.shell.run import group_id, run, run_shell
from rollstream.settings import ProcessorSettings, Settings


@pytest.fixture
def uvloop_policy() -> Iterator[None]:
    """What another library may have chosen for the process: uvloop. What the shell chooses is taken back."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@pytest.mark.parametrize("stages", [(), ("join", "grup")])
def test_unknown_or_no_stages_are_refused(stages: tuple[str, ...]) -> None:
    """At start, with the names that are known."""
    with pytest.raises(SettingsError, match="expected some of"):
        run(Settings(processor=ProcessorSettings(stages=stages)))


def test_group_is_named_after_the_stages() -> None:
    """Processes with other stages are other groups: each commits for itself."""
    assert group_id("rollstream", ["join", "group"]) == "rollstream.processor.join-group"


def test_shell_runs_on_asyncio_s_own_loop(monkeypatch: pytest.MonkeyPatch, uvloop_policy: None) -> None:
    """Under uvloop a write to what a killed broker has closed is a RuntimeError: it ends the task that keeps aiokafka's metadata,
    and the worker waits for its coordinator for ever.
    """
    loops: list[type] = []

    async def serve(*_: Any) -> None:
        loops.append(type(asyncio.get_running_loop()))

    monkeypatch.setattr(process, "_serve", serve)

    run_shell(Settings(), SimpleNamespace, ["join"])  # type: ignore[arg-type]

    assert [asyncio.SelectorEventLoop] == loops


@pytest.mark.timeout(30)
def test_stop_that_hangs_ends_within_its_bound_and_tells_why(
    monkeypatch: pytest.MonkeyPatch, uvloop_policy: None
) -> None:
    """A worker that crashed and cannot leave its group ends all the same, with the reason of the crash."""
    reason = BrokerError("cannot commit", reason="no_commit")
    app = _HangingApp(reason)
    monkeypatch.setattr(process, "_STOP_S", 0.01)
    monkeypatch.setattr(process, "build_app", lambda *_: app)

    with pytest.raises(BrokerError) as raised:
        run_shell(Settings(), SimpleNamespace, ["join"])  # type: ignore[arg-type]

    assert raised.value is reason
    assert app.is_stopping


class _HangingApp:
    """A Faust app that crashes as it starts and never comes to the end of its stop."""

    def __init__(self, crash_reason: BaseException) -> None:
        self.crash_reason = crash_reason
        self.has_ended = asyncio.Event()
        self.is_stopping = False

    def finalize(self) -> None:
        pass

    async def start(self) -> None:
        self.has_ended.set()

    async def stop(self) -> None:
        self.is_stopping = True
        await asyncio.Event().wait()
