"""A real schema registry that speaks Confluent's API over HTTP: Apicurio Registry, run from its archive, in memory.

The archive is fetched once by Maven into `build/registry/`. Version 2.6 is the newest that runs on Java 17. A stop forgets
all schemas, as `pause()` and `resume()` do not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from rollstream.process import Service, ServiceError, ServiceProcess, free_port
from tests.services import BUILD, locked

VERSION = "2.6.13.Final"
_ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
_START_S = 240.0  # 20 s on an idle machine of 2 cores


def registry_folder() -> Path:
    """The unpacked archive, fetched first when it is not there.

    Raises:
        ServiceError: Maven failed; the message names the log file.
    """
    folder = BUILD / f"registry-{VERSION}"
    with locked(folder):
        if not folder.exists():
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            with tarfile.open(_fetch(part)) as archive:
                archive.extractall(part, filter="data")
            next(part.glob("*.tar.gz")).unlink()
            part.rename(folder)
    return folder


def _fetch(folder: Path) -> Path:
    log_file = folder.with_suffix(".log")
    command = ["mvn", "-B", "-q", "dependency:copy", f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={folder}"]
    with log_file.open("wb") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, check=False)
        except FileNotFoundError as error:
            raise ServiceError(
                "cannot fetch the registry: `mvn` is not installed; install Maven and Java 17"
            ) from error
    if done.returncode != 0:
        raise ServiceError(f"cannot fetch the registry: mvn ended with status {done.returncode}; see {log_file}")
    return next(folder.glob("*.tar.gz"))


class SchemaRegistry(Service):
    """One registry, empty at the start; a context manager that starts it and stops it.

    Args:
        folder: where its log file lies.
        heap_mb: size of the Java heap.
    """

    def __init__(self, folder: Path, *, heap_mb: int = 320) -> None:
        self.folder = folder
        self.port = free_port()
        self._heap_mb = heap_mb

    @property
    def url(self) -> str:
        """Where Confluent's API is, such as `http://127.0.0.1:20123/apis/ccompat/v7`."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def start(self) -> float:
        """Start the registry on its port; returns the seconds until it answered."""
        if self._process is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            unpacked = registry_folder()
            java = ["java", f"-Xmx{self._heap_mb}m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-jar"]
            self._process = ServiceProcess(
                "the schema registry",
                [*java, unpacked / f"apicurio-registry-app-{VERSION}-runner.jar"],
                log_file=self.folder / "registry.log",
                env={"QUARKUS_HTTP_HOST": "127.0.0.1", "QUARKUS_HTTP_PORT": str(self.port)},
                cwd=self.folder,
            )
        self._process.start()
        return self._process.wait_until(self._answers, _START_S, "it lists its subjects")

    def register(self, subject: str, text: str) -> int:
        """Register any schema, as another program would. Returns: its id."""
        request = urllib.request.Request(
            f"{self.url}/subjects/{subject}/versions",
            data=json.dumps({"schema": text, "schemaType": "AVRO"}).encode(),
            headers={"content-type": "application/vnd.schemaregistry.v1+json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(json.load(answer)["id"])

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/subjects", timeout=2) as answer:
            return bool(answer.status == 200)
