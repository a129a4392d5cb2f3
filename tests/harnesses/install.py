"""Fills `build/harnesses/` with the harnesses of `package.json`, by npm.

npm runs no install scripts unless told to: Claude Code's, which puts its program in place, is run here. Run
`python -m tests.harnesses.install`, or let the tests do it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from rollstream.process import ServiceError
from tests.services import BUILD, locked

_PACKAGES = Path(__file__).with_name("package.json")
_FOLDER = BUILD / "harnesses"
_STAMP = _FOLDER / "complete.json"
_LOG = BUILD / "harnesses.log"
_MODULES = _FOLDER / "node_modules"


def harness_programs() -> Path:
    """The folder with the programs `claude` and `codex`, which is made first when it is not there.

    Raises: ServiceError: an install step failed; the message names the log file.
    """
    with locked(_FOLDER):
        if not (_STAMP.exists() and _STAMP.read_bytes() == _PACKAGES.read_bytes()):
            shutil.rmtree(_FOLDER, ignore_errors=True)
            _FOLDER.mkdir(parents=True)
            shutil.copyfile(_PACKAGES, _FOLDER / "package.json")
            _run("npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(_FOLDER))
            _run("node", str(_MODULES / "@anthropic-ai" / "claude-code" / "install.cjs"))
            shutil.copyfile(_PACKAGES, _STAMP)
    return _MODULES / ".bin"


def _run(*command: str) -> None:
    with _LOG.open("ab") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        except FileNotFoundError as error:
            raise ServiceError(
                f"cannot install the harnesses: there is no {command[0]!r}; install Node.js"
            ) from error
    if done.returncode != 0:
        raise ServiceError(
            f"cannot install the harnesses: {command[0]} ended with status {done.returncode}; see {_LOG}"
        )


if __name__ == "__main__":
    print(harness_programs())
