"""`docs/reasons.md` names every reason code of the product, and no other."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from rollstream.producers.call import DEFECTS
from tests.contract.checkout import FOLDERS, ROOT, python_files
from tests.contract.reason_codes import codes_in

_ROW = re.compile(r"^\| `(?P<code>\w+)` \|(?P<cells>.*)\|$", re.MULTILINE)
_NO_CODES = {
    "abort": "how an engine ended a call, in its own word",
    "length": "how an engine ended a call, in its own word",
    "stop": "how an engine ended a call, in its own word",
}
"""Words that the search takes for codes → what they are."""


def rows() -> list[tuple[str, list[str]]]:
    """Code and other cells of each row of the table."""
    text = (ROOT / "docs" / "reasons.md").read_text("utf-8")
    return [(row["code"], [cell.strip() for cell in row["cells"].split("|")]) for row in _ROW.finditer(text)]


@functools.cache
def codes() -> dict[str, str]:
    """Code → a place in the code where it is given."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in python_files(folder):
            for code, line in codes_in(path).items():
                found.setdefault(code, f"{path.relative_to(ROOT)}:{line}")
    return found


def test_every_reason_code_is_in_the_docs_with_what_to_do() -> None:
    """Whoever meets a code at night finds it in one table."""
    documented = {code for code, _ in rows()}
    missing = {code: place for code, place in codes().items() if code not in documented | _NO_CODES.keys()}

    assert missing == {}, (
        "add to docs/reasons.md a row `| code | where | what it means | what to do |` for each of these"
    )


def test_the_docs_name_no_reason_code_that_is_gone() -> None:
    """A row about a code that nothing gives any more is taken out."""
    stale = {code for code, _ in rows()} - (codes().keys() - _NO_CODES.keys())

    assert stale == set(), (
        "take these rows out of docs/reasons.md, or teach tests/contract/reason_codes.py to find the code"
    )


def test_the_table_is_sorted_and_whole() -> None:
    """One row a code, sorted, with all four cells filled."""
    table = rows()

    assert sorted({code for code, _ in table}) == [code for code, _ in table]
    assert [] == [code for code, cells in table if len(cells) != 3 or not all(cells)]


def test_every_word_that_is_no_code_still_appears() -> None:
    """The list of exceptions does not outlive them."""
    assert _NO_CODES.keys() <= codes().keys()


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SchemaError(text, reason='a_code')", "a_code"),
        ("raise BrokerError(text, reason='one' if is_one else 'other')", "other"),
        ("self._ledger.reject(event, 'a_code', message)", "a_code"),
        ("Reject(event, 'join', 'a_code', message)", "a_code"),
        ("def refuse():\n    return 'a_code', f'rollout {name!r} is late'", "a_code"),
        ("missing = MissingMember('a_code', name)", "a_code"),
        ("Said(error=f'a_code: {text}')", "a_code"),
        ("_EXCLUDED = {'one': 'other'}", "other"),
        ("reason = 'a_code'", "a_code"),
        ("def __init__(self, *, reason: str = 'a_code'): ...", "a_code"),
    ],
)
def test_the_search_finds_a_code_however_it_is_given(tmp_path: Path, source: str, code: str) -> None:
    """A new code cannot be missed because it is written in another form that is in use."""
    ast.parse(source)
    file = tmp_path / "stage.py"
    file.write_text(source)

    assert code in codes_in(file)


def test_the_search_finds_every_defect() -> None:
    """The defects of a call are a table in the code; all of it is found."""
    assert DEFECTS.keys() <= codes().keys()
