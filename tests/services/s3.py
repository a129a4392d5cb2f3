"""A real S3 server, versitygw over a folder, built once from the Go module proxy into `build/bin/`.

It refuses to create an object that exists (`If-None-Match: *`) and to replace one whose ETag has changed, also in a
race, which is what the manifests of the object sink rest on. The data is plain files below the server's folder and
outlives `kill()` and `restart()`.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from rollstream.process import Service, ServiceError, ServiceProcess, free_port
from tests.services import BUILD, locked

VERSION = "v1.8.0"
ACCESS_KEY = "rollstream"
SECRET_KEY = "rollstream-secret"  # of a server on the loopback address that lives as long as a test
REGION = "us-east-1"
_START_S = 30.0  # 0.1 s on an idle machine


def versitygw_binary() -> Path:
    """Path of the server's executable, which is built first (2 minutes on 2 cores) when it is not there.

    Raises:
        ServiceError: the build failed; the message names the log file.
    """
    folder = BUILD / "bin" / f"versitygw-{VERSION}"
    binary = folder / "versitygw"
    with locked(folder):
        if not binary.exists():
            _build(folder)
    return binary


def _build(folder: Path) -> None:
    log_file = folder.with_name(folder.name + ".log")
    command = ["go", "install", "-ldflags=-s -w", f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"]
    with log_file.open("wb") as log:
        try:
            env = {**os.environ, "GOBIN": str(folder)}
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, check=False)
        except FileNotFoundError as error:
            raise ServiceError("cannot build versitygw: `go` is not installed; install Go 1.26 or newer") from error
    if done.returncode != 0:
        raise ServiceError(f"cannot build versitygw: go install ended with status {done.returncode}; see {log_file}")


class S3Server(Service):
    """One S3 server; a context manager that starts it and stops it.

    Clients use path-style addresses (no virtual hosts), plain HTTP, `ACCESS_KEY`, `SECRET_KEY` and `REGION`.

    Args:
        folder: where buckets and the log file lie; its file system needs extended attributes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()

    @property
    def endpoint(self) -> str:
        """Address for S3 clients, such as `http://127.0.0.1:20123`."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start the server on its port and folder; returns the seconds until it accepts connections."""
        if self._process is None:
            buckets = self.folder / "buckets"
            buckets.mkdir(parents=True, exist_ok=True)
            self._process = ServiceProcess(
                "versitygw",
                [versitygw_binary(), "--port", f"127.0.0.1:{self.port}", "--region", REGION, "posix", buckets],
                log_file=self.folder / "s3.log",
                env={"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
            )
        self._process.start()
        return self._process.wait_until(self._accepts, _START_S, f"port {self.port} accepts connections")

    def create_bucket(self, name: str) -> None:
        """Create an empty bucket; S3 wants names of 3 to 63 lower-case letters, digits and hyphens."""
        (self.folder / "buckets" / name).mkdir(parents=True, exist_ok=True)

    def _accepts(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
