"""Nothing in the project depends on one machine."""

from __future__ import annotations

import re

from tests.contract.checkout import ROOT, kept_files

# Written in two parts, so that this file does not find itself.
_HOMES = re.compile(r"(?<![\w.$}])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w")
_ADDRESS = re.compile(r"https?://([a-z0-9-]+(?:\.[a-z0-9-]+)+)", re.IGNORECASE)
_DOCUMENTS = {"keepachangelog.com", "semver.org", "www.apache.org", "maven.apache.org", "json-schema.org"}
"""Hosts of texts and schemas that files refer to; nothing is fetched from them."""
_OURS = re.compile(r"127\.0\.0\.1|host\.docker\.internal|.*\.example(\.org)?")
"""This machine, and names that exist nowhere."""
_PLACES = re.compile(r"--(?:extra-)?index-" + r"url|--find-" + r"links|image:\s*[\"']?[\w-]+\.[\w.-]+/")
"""Options that name an index, and images of a named registry."""
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
    """Where packages come from is the business of each machine's own configuration: only known hosts stand in any file."""
    texts = {path: path.read_text("utf-8") for path in kept_files() if path.suffix in _TEXT}
    broken = [
        f"{path.relative_to(ROOT)}: {host}"
        for path, text in texts.items()
        for host in _ADDRESS.findall(text)
        if host not in _DOCUMENTS and not _OURS.fullmatch(host)
    ]
    broken += [f"{path.relative_to(ROOT)}: {m[0]}" for path, text in texts.items() for m in _PLACES.finditer(text)]

    assert broken == []


def test_constraints_are_plain_pins() -> None:
    """Names and versions: no address, no hash, no option."""
    for file in ROOT.glob("constraints*.txt"):
        lines = [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith("#")]

        assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9A-Za-z.+!]+", line)] == []
        assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
