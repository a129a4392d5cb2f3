"""The package list, the links and the wheel: the layout of the top-level folders works for builds and for tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.contract.checkout import FOLDERS, ROOT, module_name, pyproject, python_files

DATA = {
    "rollstream": "py.typed",
    "rollstream.schemas": "avro/model_call.v1.avsc topics/calls.yaml examples/calls/v1/barrier.pass.json",
    "rollstream.sinks": "ddl/001_sources.sql",
}


def test_package_list_equals_the_folders_on_disk() -> None:
    """A new package folder that pyproject.toml does not list would be missing from the wheel."""
    on_disk = {module_name(path) for folder in FOLDERS for path in python_files(folder) if path.name == "__init__.py"}

    listed = pyproject()["tool"]["setuptools"]["packages"]

    assert sorted(on_disk) == sorted(listed)
    assert listed == sorted(listed)


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder of modules without `__init__.py` works in the checkout and is missing from the wheel."""
    folders = {path.parent for folder in FOLDERS for path in python_files(folder)}

    missing = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]

    assert missing == []


def test_links_are_relative_and_lead_to_the_folders() -> None:
    """Tools that do not read the package map find each folder through a link that survives a clone."""
    links = {path.name: os.readlink(path) for path in (ROOT / "rollstream").iterdir() if path.is_symlink()}

    assert links == {folder: f"../{folder}" for folder in FOLDERS if folder != "rollstream"}


def test_package_map_names_every_folder() -> None:
    """Each top-level folder is mapped below rollstream."""
    expected = {"rollstream" if folder == "rollstream" else f"rollstream.{folder}": folder for folder in FOLDERS}

    assert pyproject()["tool"]["setuptools"]["package-dir"] == expected


def test_coverage_and_pyright_name_every_folder() -> None:
    """With `rollstream` alone, both tools silently skip the linked folders."""
    tool = pyproject()["tool"]

    assert sorted(FOLDERS) == sorted(tool["coverage"]["run"]["source"])
    assert sorted(FOLDERS) == sorted(tool["pyright"]["include"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built the way a release is: the source distribution first, the wheel from it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    _build("build_sdist", source, work)
    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    _build("build_wheel", next(work.glob("rollstream-*/")), work)
    return next(work.glob("*.whl"))


def _build(hook: str, source: Path, out: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    """What is in the folders is in the wheel, by its own name only."""
    expected = {
        module_name(path).replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for folder in FOLDERS
        for path in python_files(folder)
    }

    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".py")]

    assert sorted(expected) == sorted(modules)


def test_wheel_serves_every_kind_of_data_file(wheel: Path, tmp_path: Path) -> None:
    """Schemas, topics, examples and tables are readable where only the wheel is installed."""
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "from importlib.resources import files; import rollstream\n"
        f"for package, names in {DATA!r}.items():\n"
        "    for name in names.split(): files(package).joinpath(name).read_text('utf-8')\n"
        "print(rollstream.__file__)"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(target / "rollstream" / "__init__.py")
