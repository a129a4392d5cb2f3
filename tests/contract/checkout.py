"""Where things are in the checkout, for the tests of this folder."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rollstream", "schemas", "producers", "processors", "sinks", "trainers")


def pyproject() -> dict[str, Any]:
    """The parsed `pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def python_files(folder: str) -> Iterator[Path]:
    """The Python files of one of our folders; links inside it are not followed."""
    pending = [ROOT / folder]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.is_symlink():
                continue
            if path.is_dir():
                pending.append(path)
            elif path.suffix == ".py":
                yield path


def module_name(path: Path) -> str:
    """`sinks/run.py` → `rollstream.sinks.run`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "rollstream":
        parts.insert(0, "rollstream")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_import_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports, wherever in it; with `at_import_only`, not those inside functions.

    Imports for type checkers only (`if TYPE_CHECKING:`) do not happen and are left out with `at_import_only`.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module_name(path).split(".")
                up = node.level - (path.name == "__init__.py")
                base = ".".join([*parents[: len(parents) - up], *filter(None, [node.module])])
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        elif at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif at_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
    return found


def kept_files() -> list[Path]:
    """The files that belong to the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in sorted(set(names)) if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]
