"""Who may import whom: `schemas ← producers, processors, sinks, trainers`, and siblings never each other."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.contract.checkout import FOLDERS, ROOT, imports, pyproject, python_files

SIBLINGS = ("producers", "processors", "sinks", "trainers")
EXTRAS_OF = {
    "rollstream": ("embedded",),  # embedded.py
    "schemas": ("registry",),
    "producers": ("gateway", "embedded"),  # engine `local`
    "processors": ("processor",),
    "sinks": ("sink", "embedded"),  # chdb
    "trainers": ("trainer",),
    "examples": ("gateway", "sink", "trainer", "embedded"),
    "benchmarks": ("gateway", "processor", "sink", "trainer", "embedded", "dev"),
    "chaos": ("gateway", "processor", "sink", "trainer", "registry", "embedded", "dev"),
    "tests": ("gateway", "processor", "sink", "trainer", "registry", "embedded", "dev"),
}
"""The extras that may be needed by a folder's modules, beside the base dependencies."""


def _folder_of(name: str) -> str | None:
    """Which of the linked folders a module belongs to."""
    parts = name.split(".")
    return parts[1] if parts[0] == "rollstream" and len(parts) > 1 and parts[1] in FOLDERS else None


@pytest.mark.parametrize("folder", ["schemas", *SIBLINGS])
def test_folder_imports_only_core_schemas_and_itself(folder: str) -> None:
    """No sibling knows another; the schemas know none of them."""
    allowed = {folder, "schemas", None}

    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(folder)
        for name in imports(path)
        if _folder_of(name) not in allowed or name == "rollstream.cli" or name.split(".")[0] in ("tests", "examples")
    ]

    assert broken == []


def test_core_imports_no_sibling_but_lazily_in_the_command_line() -> None:
    """The core stands below the folders; only `cli.py` knows them all, and loads them when it runs a command."""
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("rollstream")
        for name in imports(path, at_import_only=path.name == "cli.py")
        if _folder_of(name) in SIBLINGS
    ]

    assert broken == []


def test_no_file_imports_a_top_level_folder_by_its_bare_name() -> None:
    """`import schemas` works in the checkout only."""
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in (*FOLDERS, "benchmarks", "chaos", "examples", "tests")
        for path in python_files(folder)
        for name in imports(path)
        if name.split(".")[0] in FOLDERS and not name.startswith("rollstream")
    ]

    assert broken == []


@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_every_foreign_import_is_declared_for_its_process(folder: str) -> None:
    """A package that one process's modules import stands in its extra or in the base dependencies."""
    project = pyproject()["project"]
    wanted = [*project["dependencies"], *(d for e in EXTRAS_OF[folder] for d in project["optional-dependencies"][e])]
    declared = {_canonical(requirement) for requirement in wanted}

    undeclared = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(folder)
        for name in {found.split(".")[0] for found in imports(path)}
        if name not in sys.stdlib_module_names
        and name not in ("rollstream", "benchmarks", "chaos", "examples", "tests")
        and not _distributions(name) & declared
    }

    assert undeclared == set()


@cache
def _distributions(module: str) -> frozenset[str]:
    names = importlib.metadata.packages_distributions().get(module, [module])
    return frozenset(_canonical(name) for name in names)


def _canonical(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "rollstream.schemas.records",
            "faust mode aiokafka clickhouse_connect chdb torch fastapi starlette pyarrow openai",
        ),
        (
            "rollstream.schemas.codec",
            "faust mode aiokafka clickhouse_connect chdb torch fastapi starlette pyarrow openai",
        ),
        ("rollstream.producers", "faust mode aiokafka clickhouse_connect torch transformers"),
        ("rollstream.producers.gateway", "faust mode aiokafka clickhouse_connect torch transformers"),
        ("rollstream.producers.gateway.serve", "faust mode aiokafka clickhouse_connect torch transformers"),
        ("rollstream.processors.pipeline", "faust mode aiokafka starlette clickhouse_connect torch"),
        ("rollstream.sinks.run", "faust mode aiokafka starlette torch"),
        ("rollstream.trainers", "faust mode aiokafka starlette torch clickhouse_connect"),
        ("rollstream.cli", "faust mode aiokafka starlette torch clickhouse_connect confluent_kafka fastavro numpy"),
    ],
)
def test_importing_a_module_loads_no_other_process_parts(module: str, forbidden: str) -> None:
    """What one process imports never pulls in the dependencies of another."""
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({forbidden.split()!r})))"

    done = subprocess.run([sys.executable, "-c", code], cwd=Path("/"), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
