"""Child processes of tests and of `make demo`: start one, wait until it works, end its whole process group.

`ServiceProcess` runs one command with its output in a log file. The child leads its own process group, so that a
stop also reaches what the child started; a guard ends that group even when this process is killed. Nothing here
sleeps for a fixed time: every wait has a condition and a deadline, and ends at once when the child has died.
`rollstream.embedded` and `tests/services/` build on it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollstream.errors import RollstreamError

# Below Linux's range of ephemeral ports (32768 and up): there an outgoing connection could take the port of a stopped
# server, or a client that reconnects to it could even connect to itself.
_PORTS = range(20_000, 32_000)
_POLL_S = 0.05
_claims: dict[int, socket.socket] = {}


class ServiceError(RollstreamError):
    """A service could not be installed, started or reached; the message names its log file."""


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on. No other call on this machine gets it while this process lives.

    Raises:
        ServiceError: no port was free in 200 tries.
    """
    for port in random.sample(_PORTS, 200):
        if port not in _claims and _claim(port) and _is_free(port):
            return port
    raise ServiceError(
        f"cannot find a free port: 200 tries in {_PORTS.start}..{_PORTS.stop} failed; stop other servers"
    )


def _claim(port: int) -> bool:
    """Whether the port is now ours: a socket has its number as a name (Linux: one that ends with the process)."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0rollstream-port-{port}")
    except OSError:  # another process has it
        claim.close()
        return False
    _claims[port] = claim
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class ServiceProcess:
    """One child process with a log file; a context manager that starts it and ends its process group.

    Args:
        name: how messages call it.
        command: program and arguments, no shell.
        log_file: receives stdout and stderr, appended, so that a restart keeps the earlier lines.
        env: variables set on top of this process's; a value of None removes the variable.
        cwd: working folder of the child.
        stop_timeout_s: how long a SIGTERM may take before SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log_file: Path,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log_file = log_file
        self.cwd = cwd
        self.stop_timeout_s = stop_timeout_s
        self._env = {**os.environ, **(env or {})}
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: _Guard | None = None
        self._log_start_bytes = 0

    @property
    def pid(self) -> int:
        """Process id of the child, which is also its process group; raises ServiceError before the first start."""
        if self._child is None:
            raise ServiceError(f"{self.name} was never started; call start() first")
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the last child (negative: the signal that ended it); None while it runs or before start."""
        return None if self._child is None else self._child.poll()

    def is_running(self) -> bool:
        """Whether the child was started and has not ended; a paused child is running."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the child; it may not be ready yet, see `wait_until`."""
        if self.is_running():
            raise ServiceError(f"{self.name} already runs: pid={self.pid}; stop it first")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self._log_start_bytes = log.tell()
            env = {name: value for name, value in self._env.items() if value is not None}
            try:
                self._child = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=self.cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServiceError(f"cannot start {self.name}: command={self.command[0]!r}: {error}") from error
        self._release_guard()
        self._guard = _Guard(self._child.pid)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str = "it is ready") -> float:
        """Wait until the condition holds while the child runs.

        Args:
            condition: cheap, returns False while not yet; a raised OSError counts as not yet.
            timeout_s: deadline from now.
            what: the condition in words, for the message.

        Returns:
            Seconds waited.

        Raises:
            ServiceError: the child ended, or the deadline passed.
        """
        begun = time.monotonic()
        while True:
            if not self.is_running():
                self.kill()
                raise ServiceError(
                    f"{self.name} ended with status {self.returncode} before {what}; "
                    f"see its log {self.log_file}:\n{self.log_tail()}"
                )
            if _holds(condition):
                return time.monotonic() - begun
            if time.monotonic() - begun > timeout_s:
                raise ServiceError(
                    f"{self.name} took more than {timeout_s:g} s until {what}; raise the timeout, or see its log "
                    f"{self.log_file}:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def wait_exit(self, timeout_s: float) -> int:
        """Wait for the child to end by itself and return its exit status; ends what is left of its group.

        Raises:
            ServiceError: it did not end in time.
        """
        if self._child is None:
            raise ServiceError(f"{self.name} was never started; call start() first")
        try:
            status = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{self.name} did not end in {timeout_s:g} s; see its log {self.log_file}") from error
        self.kill()
        return status

    def wait_forever(self) -> int:
        """Wait for the child to end by itself, however long it takes; returns its exit status."""
        if self._child is None:
            raise ServiceError(f"{self.name} was never started; call start() first")
        return self._child.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's process group; nothing happens when it is gone."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def stop(self) -> None:
        """End the process group: SIGTERM, then SIGKILL after `stop_timeout_s`; harmless when it is not running."""
        if self._child is None:
            return
        if self.is_running():
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a paused process only acts on SIGTERM once it continues
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self.stop_timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the process group with SIGKILL and reap the child: what a crash looks like to everyone else."""
        self.signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
        self._release_guard()

    def pause(self) -> None:
        """Freeze the process group (SIGSTOP): connections stay open and nothing answers."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process group continue (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def log_text(self) -> str:
        """What the child wrote since the last start."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace")

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the child wrote since the last start."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def _release_guard(self) -> None:
        if self._guard is not None:
            self._guard.release()
            self._guard = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Service(ABC):
    """Something that runs as one `ServiceProcess` and may be stopped, crashed and started again; a context manager.

    A subclass makes its process at the first `start` and waits there until it serves.
    """

    _process: ServiceProcess | None = None

    @abstractmethod
    def start(self) -> float:
        """Start it; returns the seconds until it serves."""

    @property
    def process(self) -> ServiceProcess:
        """Its process; raises ServiceError before the first start."""
        if self._process is None:
            raise ServiceError(f"{type(self).__name__} was never started; call start() first")
        return self._process

    def stop(self) -> None:
        """End it in order; harmless before the first start."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """Crash it (SIGKILL)."""
        self.process.kill()

    def restart(self) -> float:
        """Stop and start again on the same port; returns the seconds of the start."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing is answered."""
        self.process.pause()

    def resume(self) -> None:
        """Let it continue after a pause."""
        self.process.resume()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except OSError:
        return False


class _Guard:
    """Ends a process group when this Python process ends in whatever way, SIGKILL included.

    A shell waits at the read end of a pipe whose write end only this process holds.
    """

    def __init__(self, group: int) -> None:
        reads, self._writes = os.pipe()
        command = ["sh", "-c", f"read _; kill -KILL -{group}"]
        try:
            self._shell = subprocess.Popen(
                command, stdin=reads, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            os.close(reads)

    def release(self) -> None:
        """Let the group be: it was ended in order."""
        self._shell.kill()
        self._shell.wait()
        os.close(self._writes)
