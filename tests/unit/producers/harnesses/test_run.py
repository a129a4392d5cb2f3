"""A rollout around a real process: what it is given, what is told, and that the rollout always gets its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.process import ServiceError
from rollstream.producers.harnesses.base import Place, Setup
from rollstream.producers.harnesses.child import StopSignal, run_child
from rollstream.producers.harnesses.run import Job, run_job


class FakeRollout:
    """Remembers what it is told."""

    rollout_id = "r-1"
    attempt = 2
    base_url = "http://gw.example/r/r-1/a/2/v1"
    api_key = "rs-a-key"

    def __init__(self) -> None:
        self.opened = 0
        self.events: list[tuple[str, Any]] = []
        self.ends: list[tuple[str, Any]] = []

    def __call__(self) -> Any:
        self.opened += 1
        return self

    def event(self, kind: str, content: Any) -> None:
        self.events.append((kind, content))

    def finish(self, status: str, outcome: Any) -> None:
        self.ends.append((status, outcome))


def recipe(place: Place) -> Setup:
    return Setup({"MODEL": place.model, "UNWANTED": None}, {"deep/config": f"home is {place.home}"})


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def play(environ: dict[str, str], code: str, **values: Any) -> tuple[FakeRollout, int]:
    rollout = FakeRollout()
    return rollout, run_job(Job(python(code), recipe, "policy", **values), rollout, environ)


def test_command_gets_its_rollout_and_the_recipe_and_none_of_our_settings(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """An agent that saw the admin key could open rollouts; the home is written before it starts, and gone behind it."""
    out = tmp_path / "seen.json"
    code = (
        "import glob, json, os\n"
        "homes = glob.glob(os.environ['XDG_CACHE_HOME'] + '/rollstream/*/deep/config')\n"
        f"json.dump([dict(os.environ), homes, open(homes[0]).read()], open({str(out)!r}, 'w'))"
    )
    ours = {"ROLLSTREAM_GATEWAY__ADMIN_KEY": "boss", "UNWANTED": "1"}

    rollout, exit_code = play({**environ, **ours}, code)

    seen, homes, text = json.loads(out.read_text())
    assert (0, [("succeeded", {"reward": 1.0, "exit_code": 0})]) == (exit_code, rollout.ends)
    assert {
        "ROLLOUT_ID": "r-1",
        "ROLLOUT_ATTEMPT": "2",
        "ROLLOUT_URL": "http://gw.example/r/r-1/a/2",
        "ROLLOUT_API_KEY": "rs-a-key",
        "MODEL": "policy",
    }.items() <= seen.items()
    assert set() == {name for name in seen if name.startswith("ROLLSTREAM_") or name == "UNWANTED"}
    assert f"home is {Path(homes[0]).parents[1]}" == text
    assert [] == list((tmp_path / "cache" / "rollstream").iterdir())


def test_home_that_is_given_is_kept(environ: dict[str, str], tmp_path: Path) -> None:
    """For whoever wants to read what the harness wrote there."""
    home = tmp_path / "home"

    play(environ, "pass", home=home)

    assert f"home is {home}" == (home / "deep" / "config").read_text()


def test_check_decides_without_the_key_and_its_output_is_an_event(environ: dict[str, str], tmp_path: Path) -> None:
    """The score can be understood later, and a check makes no calls in the rollout."""
    check = """printf '{"reward": 0.5, "rollout": "%s%s"}' "$ROLLOUT_ID" "$ROLLOUT_API_KEY"; exit 4"""

    rollout, exit_code = play(environ, "pass", check=check)

    outcome = {"reward": 0.5, "exit_code": 0, "check_exit_code": 4, "rollout": "r-1"}
    ((kind, content),) = rollout.events
    assert (4, [("failed", outcome)]) == (exit_code, rollout.ends)
    assert ("artifact", check, 4, "exit") == (kind, content["check"], content["exit_code"], content["ended"])
    assert '{"reward": 0.5, "rollout": "r-1"}' == content["output"]


def test_only_the_end_of_a_long_output_is_kept(environ: dict[str, str]) -> None:
    """An event has a bounded size."""
    rollout, _ = play(environ, "pass", check=f"{sys.executable} -c \"print('x' * 100_000 + 'end')\"")

    output = rollout.events[0][1]["output"]
    assert (64 * 1024, "xend\n") == (len(output), output[-5:])


def test_command_that_takes_too_long_is_truncated_with_all_it_started(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """A grandchild that ignores SIGTERM would go on making calls."""
    pid_file = tmp_path / "pid"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "inner = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', inner])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )

    rollout, exit_code = play(environ, code, timeout_s=2.0)

    assert (124, [("truncated", {"reward": 0.0, "exit_code": None})]) == (exit_code, rollout.ends)
    assert _ends(int(pid_file.read_text()))


def _ends(pid: int) -> bool:
    """Whether a process ends within the time that a loaded machine needs to end one that was killed."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_what_a_command_leaves_behind_ends_with_it(environ: dict[str, str], tmp_path: Path) -> None:
    """Calls behind the rollout's end would be late."""
    pid_file = tmp_path / "pid"
    code = f"import subprocess; open({str(pid_file)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"

    play(environ, code)

    assert _ends(int(pid_file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rollout_is_aborted_when_we_are_stopped(
    environ: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """The command is told to end, and has no reward; our own handlers are back afterwards."""
    before = signal.getsignal(number)
    pipe = tmp_path / "started"
    os.mkfifo(pipe)
    stopper = threading.Thread(target=lambda: (pipe.read_text(), os.kill(os.getpid(), number)))
    stopper.start()

    rollout, exit_code = play(environ, f"import time; open({str(pipe)!r}, 'w').close(); time.sleep(60)", check="true")
    stopper.join()

    assert (143, [("aborted", {"exit_code": None})], []) == (exit_code, rollout.ends, rollout.events)
    assert before == signal.getsignal(number)


def test_no_rollout_is_opened_for_a_program_that_is_not_there(environ: dict[str, str]) -> None:
    """The error names it."""
    rollout = FakeRollout()

    with pytest.raises(ServiceError, match="cannot run 'no-such-agent'"):
        run_job(Job(("no-such-agent",), recipe, "policy"), rollout, environ)

    assert 0 == rollout.opened


def test_rollout_whose_command_cannot_start_is_aborted(environ: dict[str, str], tmp_path: Path) -> None:
    """It is open already, so it gets its end."""
    program = tmp_path / "agent"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    rollout = FakeRollout()

    with pytest.raises(ServiceError, match="cannot run"):
        run_job(Job((str(program),), recipe, "policy"), rollout, environ)

    assert ["aborted"] == [status for status, _ in rollout.ends]


def test_child_that_does_not_heed_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a grace."""
    monkeypatch.setattr("rollstream.producers.harnesses.child._GRACE_S", 0.1)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    with (tmp_path / "out").open("w+b") as out:
        stop = _StopOnce(lambda: (tmp_path / "out").read_bytes() == b"deaf\n")
        ended = run_child(python(code), environment=os.environ, timeout_s=None, stop=stop, stdout=out)

    assert (137, "signal") == (ended.exit_code, ended.because)


class _StopOnce(StopSignal):
    """A signal that has come once a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    @property
    def number(self) -> int | None:  # type: ignore[override]
        return signal.SIGTERM if self._condition() else None
