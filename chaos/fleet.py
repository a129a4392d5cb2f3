"""Processes of ours under a restart policy like Kubernetes': who ends by itself is counted, and started again after a moment.

A fault that kills a process holds it down until the fault is over, which is not counted. One thread looks after all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rollstream.process import ServiceProcess

_LOOK_S = 0.25
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 10.0
_STEADY_S = 30.0
"""Who ran for this long starts again after the shortest wait."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A process ended by itself while it should have run."""

    member: str
    """Its name."""
    at_s: float
    """Seconds after the fleet's start."""
    status: int
    """Exit status; negative: the signal that ended it."""
    last_line: str
    """The last line of its log."""


@dataclass(slots=True)
class Member:
    """One process of the fleet."""

    process: ServiceProcess
    """What runs."""
    is_wanted: bool = True
    """Whether it should run."""
    _is_held: bool = False
    _wait_s: float = _FIRST_WAIT_S
    _started_s: float = 0.0
    _due_s: float | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        """How it is called."""
        return self.process.name

    def start(self) -> None:
        """Start it, unless it runs or is not wanted."""
        with self._lock:
            self._is_held = False
            if self.is_wanted and not self.process.is_running():
                self.process.kill()  # reaps, and ends what is left of the group
                self.process.start()
                self._started_s, self._due_s = time.monotonic(), None

    def kill(self) -> None:
        """SIGKILL it, and leave it down until `start`."""
        with self._lock:
            self._is_held = True
            self.process.kill()

    def want(self, is_wanted: bool) -> None:
        """Start it or end it in order."""
        with self._lock:
            self.is_wanted = is_wanted
        if is_wanted:
            self.start()
        else:
            self.process.stop()

    def look(self, now_s: float) -> int | None:
        """Start it again when it is due.

        Args: now_s: monotonic clock.
        Returns: its exit status if it has just been found to have ended by itself.
        """
        with self._lock:
            if not self.is_wanted or self._is_held or self.process.is_running():
                return None
            if self._due_s is None:
                is_steady = now_s - self._started_s > _STEADY_S
                self._wait_s = _FIRST_WAIT_S if is_steady else min(self._wait_s * 2, _LONGEST_WAIT_S)
                self._due_s = now_s + self._wait_s
                return self.process.returncode
            if now_s >= self._due_s:
                self.start()
            return None


class Fleet:
    """The members by name; a context manager that ends all of them.

    Args: members: not started yet.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = {member.name: member for member in members}
        self.exits: list[Exit] = []
        """Who ended by itself, in order."""
        self._begun_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="fleet")

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def start(self) -> None:
        """Start who is wanted, and look after them from now on."""
        for member in self.members.values():
            member.start()
        self._thread.start()

    def each(self, act: Callable[[Member], None]) -> None:
        """Do something to every member."""
        for member in self.members.values():
            act(member)

    def _look_after(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for member in self.members.values():
                status = member.look(time.monotonic())
                if status is not None:
                    at_s = round(time.monotonic() - self._begun_s, 1)
                    self.exits.append(Exit(member.name, at_s, status, member.process.log_tail(1)[:300]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.each(lambda member: member.process.kill())
