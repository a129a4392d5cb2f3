"""`rollstream run`: a rollout around a command. Opens it, starts the command with the recipe's setup, judges, finishes.

Whatever happens to the command, the rollout gets its end. Only where this process is killed, the join's deadline closes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollstream.process import ServiceError
from rollstream.producers.client import OpenRollout
from rollstream.producers.harnesses.base import KEY_VARIABLE, Place, Recipe, Setup
from rollstream.producers.harnesses.child import Ended, StopSignal, run_child
from rollstream.producers.harnesses.verdict import ErrorIs, Verdict, judge, needs_check
from rollstream.schemas.records import EventKind
from rollstream.settings import PREFIX

_SHOWN_BYTES = 64 * 1024
"""Most of a check's output that is kept."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command and how it is judged."""

    command: tuple[str, ...]
    """Program and arguments."""
    recipe: Recipe
    """How it is told of its rollout."""
    model: str
    """Model name that it asks for."""
    context_tokens: int | None = None
    """As in `Place`."""
    check: str | None = None
    """Shell command that decides, run where the command ran; None: the command's exit code does."""
    check_timeout_s: float = 600.0
    """How long the check may take; then it has failed."""
    timeout_s: float | None = None
    """How long the command may take; then the rollout is truncated. None: any time."""
    error_is: ErrorIs = ErrorIs.FAILED
    """What another exit code than 0 of the command means."""
    home: Path | None = None
    """Folder for the harness's settings and state, kept; None makes one and removes it."""


def run_job(job: Job, open_rollout: Callable[[], OpenRollout], environ: Mapping[str, str]) -> int:
    """Play one rollout. Returns: the exit code for this process. Call it in the main thread.

    Args: open_rollout: called once it is known that the command exists. environ: variables of this process.

    Raises: ServiceError: the command cannot be started. BrokerError: the rollout could not be opened or finished.
    """
    if shutil.which(job.command[0], path=environ.get("PATH")) is None:
        raise ServiceError(
            f"cannot run {job.command[0]!r}: there is no such program in PATH; install it, or give its path"
        )
    with StopSignal().noted() as stop:
        rollout = open_rollout()
        try:
            verdict = _play(job, rollout, environ, stop)
        except OSError as cause:
            rollout.finish("aborted", {"error": str(cause)})
            raise ServiceError(f"cannot run {job.command[0]!r}: {cause}") from cause
        rollout.finish(verdict.status.value, verdict.outcome)
    return verdict.exit_code


def command_environment(environ: Mapping[str, str], rollout: OpenRollout, setup: Setup) -> dict[str, str]:
    """What a command sees: our variables less our settings, since an agent with the admin key could open rollouts and change
    weights; its rollout; and the recipe's.
    """
    values: dict[str, str | None] = {
        **check_environment(environ, rollout),
        "ROLLOUT_URL": _root_url(rollout),
        KEY_VARIABLE: rollout.api_key,
        **setup.environment,
    }
    return {name: value for name, value in values.items() if value is not None}


def check_environment(environ: Mapping[str, str], rollout: OpenRollout) -> dict[str, str]:
    """What a check sees: which rollout it is about, and no key to it."""
    ours = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return {**ours, "ROLLOUT_ID": rollout.rollout_id, "ROLLOUT_ATTEMPT": str(rollout.attempt)}


def _root_url(rollout: OpenRollout) -> str:
    return rollout.base_url.removesuffix("/v1")


def _play(job: Job, rollout: OpenRollout, environ: Mapping[str, str], stop: StopSignal) -> Verdict:
    with _home(job, environ) as home:
        setup = job.recipe(Place(_root_url(rollout), rollout.api_key, job.model, job.context_tokens, home))
        for name, text in setup.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        environment = command_environment(environ, rollout, setup)
        ended = run_child(job.command, environment=environment, timeout_s=job.timeout_s, stop=stop)
    if job.check is None or not needs_check(ended, job.error_is):
        return judge(ended, job.error_is)
    with tempfile.TemporaryFile() as output:
        checked = run_child(
            ("/bin/sh", "-c", job.check),
            environment=check_environment(environ, rollout),
            timeout_s=job.check_timeout_s,
            stop=stop,
            stdout=output,
        )
        printed = _tail(output)
    _tell(rollout, job.check, checked, printed)
    return judge(ended, job.error_is, checked, printed)


@contextmanager
def _home(job: Job, environ: Mapping[str, str]) -> Iterator[Path]:
    """The harness's folder. Not below /tmp: there Codex does not make the programs that its tools call."""
    if job.home is not None:
        job.home.mkdir(parents=True, exist_ok=True)
        yield job.home.absolute()
        return
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollstream"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as made:
        yield Path(made)


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _SHOWN_BYTES))
    return output.read().decode(errors="replace")


def _tell(rollout: OpenRollout, check: str, ended: Ended, printed: str) -> None:
    """The check's output, so that a score can be understood later."""
    content = {"check": check, "exit_code": ended.exit_code, "ended": ended.because, "output": printed}
    rollout.event(EventKind.ARTIFACT.value, content)
