"""A small network of namespaces on this machine, so that the cable of one process can be pulled.

Each member has a network namespace of its own with one address, `10.<x>.<y>.<n>/24`, on a bridge that lies in a
namespace too; this machine is the member at `.1`. A namespace lives as long as the idle process that holds it, and its
cables go with it: nothing stays behind, however the run ends. Needs root, `ip`, `nsenter` and `unshare`.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollstream.process import ServiceError, ServiceProcess
from tests.services.kafka import Place

_READY_S = 10.0
_IDLE = ("unshare", "--net", "sleep", "infinity")


class Network:
    """Namespaces on one bridge; a context manager that makes them and takes them away.

    Args:
        members: their names; the first has the address `.2`.
        folder: for the log files of the idle processes.
    """

    def __init__(self, members: list[str], folder: Path) -> None:
        # Two runs on one machine must not share a subnet.
        self._subnet = f"10.{200 + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self._cable_here = f"rsc{os.getpid()}"
        self._numbers = {name: number for number, name in enumerate(members, start=2)}
        self._holders = {
            name: ServiceProcess(f"network of {name}", _IDLE, log_file=folder / f"network-{name}.log")
            for name in ["switch", *members]
        }
        self._stack = ExitStack()

    def place(self, member: str) -> Place:
        """Where a process of that member runs."""
        return Place(f"{self._subnet}.{self._numbers[member]}", self._enter(member))

    def cut(self, member: str) -> None:
        """Pull a member's cable: what is under way is lost, and nothing says so to either side."""
        self._in_switch("link", "set", _cable(self._numbers[member]), "down")

    def heal(self, member: str) -> None:
        """Plug it in again."""
        self._in_switch("link", "set", _cable(self._numbers[member]), "up")

    def _enter(self, member: str) -> tuple[str, ...]:
        return ("nsenter", f"--net={_namespace(self._holders[member])}")

    def _in_switch(self, *arguments: str) -> None:
        _run(*self._enter("switch"), "ip", *arguments)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for holder in self._holders.values():
                stack.enter_context(holder)
                holder.wait_until(lambda holder=holder: _is_apart(holder), _READY_S, "it has a namespace")  # type: ignore[misc]
            self._in_switch("link", "add", "bridge", "type", "bridge")
            self._in_switch("link", "set", "bridge", "up")
            switch = str(self._holders["switch"].pid)
            _run("ip", "link", "add", self._cable_here, "type", "veth", "peer", "name", _cable(1), "netns", switch)
            stack.callback(subprocess.run, ["ip", "link", "del", self._cable_here], capture_output=True, check=False)
            self._plug(1)
            _run("ip", "addr", "add", f"{self._subnet}.1/24", "dev", self._cable_here)
            _run("ip", "link", "set", self._cable_here, "up")
            for name, number in self._numbers.items():
                pid = str(self._holders[name].pid)
                self._in_switch("link", "add", _cable(number), "type", "veth", "peer", "name", "eth0", "netns", pid)
                self._plug(number)
                enter = self._enter(name)
                _run(*enter, "ip", "link", "set", "lo", "up")
                _run(*enter, "ip", "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
                _run(*enter, "ip", "link", "set", "eth0", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _plug(self, number: int) -> None:
        self._in_switch("link", "set", _cable(number), "master", "bridge", "up")

    @property
    def here(self) -> str:
        """The address of this machine, as the members reach it."""
        return f"{self._subnet}.1"


def missing_for_network() -> str | None:
    """Why no network can be made here; None when it can."""
    try:
        _run(*_IDLE[:2], "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    except ServiceError as error:
        return str(error)
    return None


def _cable(number: int) -> str:
    return f"port{number}"


def _namespace(holder: ServiceProcess) -> str:
    return f"/proc/{holder.pid}/ns/net"


def _is_apart(holder: ServiceProcess) -> bool:
    return Path(_namespace(holder)).readlink() != Path("/proc/self/ns/net").readlink()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServiceError(
            f"cannot run {command[0]!r}: it is not installed; install iproute2 and util-linux"
        ) from error
    if done.returncode != 0:
        raise ServiceError(f"cannot change the network: {' '.join(command)!r}: {done.stderr.strip()}; root is needed")
