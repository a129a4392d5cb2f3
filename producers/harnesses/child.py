"""Runs a command to its end, its deadline, or a signal to us; nothing that it started in its group outlives it.

What an agent leaves behind would go on making calls in a rollout that is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import IO, Literal

_GRACE_S = 10.0
"""How long a command may take to end after SIGTERM; harnesses write their transcript then."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    exit_code: int
    """As a shell has it: 128 and the number of the signal that ended it."""
    because: Literal["exit", "timeout", "signal"] = "exit"
    """By itself, at its deadline, or because we were told to stop."""


class StopSignal:
    """SIGINT and SIGTERM to this process, noted; whoever waits for a child looks here."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first that came."""

    @contextmanager
    def noted(self) -> Iterator[StopSignal]:
        """Note signals within the block. Only in the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number


def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float | None,
    stop: StopSignal,
    stdout: IO[bytes] | None = None,
) -> Ended:
    """Run a command in a session of its own; at the deadline or a signal it gets SIGTERM, and SIGKILL if that is not enough.

    Args: stdout: where its output goes; None is ours.

    Raises: OSError: it cannot be started.
    """
    child = subprocess.Popen(list(command), env=dict(environment), stdout=stdout, start_new_session=True)
    try:
        because = _wait(child, timeout_s, stop)
    finally:
        _signal(child.pid, signal.SIGKILL)
        code = child.wait()
    return Ended(128 - code if code < 0 else code, because)


def _wait(
    child: subprocess.Popen[bytes], timeout_s: float | None, stop: StopSignal
) -> Literal["exit", "timeout", "signal"]:
    """Wait for the end, or ask for it."""
    deadline_s = None if timeout_s is None else monotonic() + timeout_s
    while stop.number is None and (deadline_s is None or monotonic() < deadline_s):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S if deadline_s is None else max(0.0, min(_POLL_S, deadline_s - monotonic())))
            return "exit"
    because: Literal["timeout", "signal"] = "timeout" if stop.number is None else "signal"
    _signal(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    return because


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
