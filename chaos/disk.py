"""A slow disk for one process: the kernel lets it write only so many bytes a second (cgroup v1, blkio).

What waits is what is synced to disk; other writes lie in memory until then. Needs root and a blkio hierarchy.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rollstream.process import ServiceError

_ROOT = Path("/sys/fs/cgroup/blkio")
_BYTES_PER_S = 128 * 1024


class SlowDisk:
    """A cgroup whose processes write slowly to the disk that holds a folder.

    Args: name: of the cgroup. folder: on the disk that becomes slow.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._group = _ROOT / f"rollstream-chaos-{os.getpid()}-{name}"
        self._disk = _disk_of(folder)

    def begin(self, pid: int) -> None:
        """Slow down a process. Raises: ServiceError: the kernel refuses."""
        try:
            self._group.mkdir(exist_ok=True)
            self._limit(_BYTES_PER_S)
            (self._group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise ServiceError(
                f"cannot slow down the disk of pid={pid}: {error}; root and cgroup v1 are needed"
            ) from error

    def end(self) -> None:
        """Let all of them write as fast as before; harmless without a `begin`."""
        if not self._group.exists():
            return
        self._limit(0)
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (_ROOT / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # a process that is ending still is in it
            self._group.rmdir()

    def _limit(self, bytes_per_s: int) -> None:
        (self._group / "blkio.throttle.write_bps_device").write_text(f"{self._disk} {bytes_per_s}")


def missing_for_slow_disk(folder: Path) -> str | None:
    """Why the disk of a folder cannot be made slow; None when it can."""
    disk = SlowDisk("probe", folder)
    try:
        disk.begin(os.getpid())
    except ServiceError as error:
        return str(error)
    finally:
        disk.end()
    return None


def _disk_of(folder: Path) -> str:
    """Number of the whole disk that holds a folder, such as `8:0`; limits are for disks, not for their partitions."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block") / number
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number
