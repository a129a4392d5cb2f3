"""The real parts that tests run against, each a context manager on a free port of the loopback address.

What they need is fetched once by the ordinary package clients into `build/` below the repository and re-used by later
runs. Two runs that start at once wait for each other (`locked`).
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock file beside a folder of `build/`, so that only one process fills the folder at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
