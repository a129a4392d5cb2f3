"""Nothing in the project depends on one machine."""

from __future__ import annotations

import re

from tests.contract.checkout import ROOT, kept_files

# Written in two parts, so that this file does not find itself.
_HOMES = re.compile(r"(?<![\w.$}])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w")
_HOSTS = [
    *("pypi" + ".org", "pythonhosted" + ".org", "registry.npm" + "js", "ghcr" + ".io", "quay" + ".io"),
    *("repo1.maven" + ".org", "repo.maven.apache" + ".org", "proxy.golang" + ".org", "index" + "-url"),
]
_REGISTRIES = re.compile("|".join(map(re.escape, _HOSTS)))
_TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".avsc", ".sql", ".txt", ".tpl", ".xml", ".example", ""}


def test_no_file_holds_a_path_of_one_machine() -> None:
    """A checkout works wherever it stands."""
    broken = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in kept_files()
        if path.suffix in _TEXT
        for match in _HOMES.finditer(path.read_text("utf-8"))
    ]

    assert broken == []


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the business of each machine's own configuration."""
    broken = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in kept_files()
        if path.suffix in _TEXT
        for match in _REGISTRIES.finditer(path.read_text("utf-8"))
    ]

    assert broken == []


def test_constraints_are_plain_pins() -> None:
    """Names and versions: no address, no hash, no option."""
    for file in ROOT.glob("constraints*.txt"):
        lines = [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith("#")]

        assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9A-Za-z.+!]+", line)] == []
        assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
