"""Dead letters as an operator looks at them: selection, lists, one in full, and which may go back. No Kafka."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rollstream.cli import cli
from rollstream.dead_letters import (
    Filed,
    Selection,
    check_ids,
    list_lines,
    opened,
    parse_since,
    select,
    show_lines,
    sort_out,
)
from rollstream.errors import SettingsError
from rollstream.schemas.codec import Codec
from rollstream.schemas.records import DeadLetter, RolloutOpened
from rollstream.schemas.types import Json
from tests.memory_claims import MemoryClaims

CODEC = Codec()
NOW_MS = 1_700_000_000_000
OPENING = RolloutOpened("r-1", 0, "g-1", 2, "task", NOW_MS, Json("{}"))


def _filed(number: int, **changes: object) -> Filed:
    values = {
        "dead_letter_id": f"{number:032x}",
        "boundary": "join",
        "reason": "late",
        "message": "came too late",
        "topic": "p.calls.v1",
        "partition": 1,
        "offset": number,
        "value": CODEC.encode(OPENING),
        "at_ms": NOW_MS,
        "key": b"g-1",
        "rollout_id": "r-1",
    }
    letter = DeadLetter(**{**values, **changes})  # type: ignore[arg-type]
    return Filed(letter, len(letter.value), NOW_MS + number, 0, number)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), [1, 2, 3]),
        (Selection(reason="conflict"), [2]),
        (Selection(boundary="decode"), [3]),
        (Selection(topic="environment"), [2]),
        (Selection(topic="p.environment.v1"), [2]),
        (Selection(rollout="r-2"), [3]),
        (Selection(since_ms=NOW_MS + 2), [2, 3]),
        (Selection(ids=(f"{1:032x}", f"{3:032x}")), [1, 3]),
        (Selection(reason="late", rollout="r-2"), []),
    ],
)
def test_selection_takes_what_all_filters_take(selection: Selection, expected: list[int]) -> None:
    """Filters narrow each other; the result is oldest first."""
    found = [
        _filed(3, boundary="decode", reason="malformed", rollout_id="r-2"),
        _filed(1),
        _filed(2, reason="conflict", topic="p.environment.v1"),
    ]

    assert [filed.offset for filed in select(found, selection)] == expected


def test_dead_letter_written_twice_is_listed_once() -> None:
    """A killed worker writes it again; the first counts."""
    first, again = _filed(1), Filed(_filed(1).letter, 1, NOW_MS + 9, 0, 9)

    assert select([first, again], Selection()) == [first]


def test_record_refused_again_for_another_reason_is_listed_once() -> None:
    """A conflict that is refused as late after a restart is one record; either refusal is found by its own id."""
    first, again = _filed(1, reason="conflict"), _filed(2, reason="late", offset=1)
    elsewhere = _filed(3, reason="late", offset=1, boundary="group")

    assert [first, elsewhere] == select([first, again, elsewhere], Selection())
    assert [again] == select([first, again, elsewhere], Selection(ids=(again.letter.dead_letter_id,)))


def test_list_shows_the_newest_last_and_counts_all() -> None:
    """A limit cuts the oldest rows and not the counts."""
    found = [_filed(1), _filed(2), _filed(3, reason="conflict")]

    lines = list_lines(found, limit=2)

    assert [line.split()[2][:12] for line in lines[1:3]] == [f"{n:032x}"[:12] for n in (2, 3)]
    assert "calls[1]@3" in lines[2]
    assert lines[3].startswith("... and 1 older ones")
    assert [line.split() for line in lines[5:]] == [
        ["2", "join:", "late"],
        ["1", "join:", "conflict"],
        ["3", "in", "all"],
    ]


def test_beginning_of_an_id_must_name_one() -> None:
    """None and several are errors that say so."""
    found = [_filed(1), _filed(2)]

    with pytest.raises(SettingsError, match="there is no dead letter 'abc'"):
        check_ids(["abc"], found)
    with pytest.raises(SettingsError, match="names 2"):
        check_ids(["0000"], found)
    check_ids([f"{1:032x}"], found)


def test_opened_dead_letter_holds_the_record() -> None:
    """Bytes that decode are shown as the record they are."""
    shown = opened(_filed(1), CODEC)

    assert (shown["record_type"], shown["record"]["rollout_id"]) == ("RolloutOpened", "r-1")
    assert json.loads("\n".join(show_lines(shown)).partition("RolloutOpened:\n")[2]) == shown["record"]


def test_unreadable_dead_letter_tells_why_and_shows_its_first_bytes() -> None:
    """Nothing is hidden because it cannot be read."""
    shown = opened(_filed(1, value=b"\xff\xffpoison" + bytes(1000), boundary="decode"), CODEC)

    lines = show_lines(shown)

    assert shown["record"] is None
    assert any("the bytes start with ffff" in line for line in lines)
    assert any(
        line.startswith("000000  ff ff 70 6f 69 73 6f 6e 00") and line.endswith("..poison........") for line in lines
    )
    assert any("first 256 of 1008 bytes" in line for line in lines)


@pytest.mark.parametrize("how", ["missing", "changed", "down"])
def test_dead_letter_of_a_large_record_shows_the_claim_check_when_the_content_cannot_be_had(how: str) -> None:
    """Which record it was, and where its bytes should be, is in Kafka."""
    claims = MemoryClaims()
    codec = Codec(claims=claims, inline_bytes=1)
    filed = _filed(1, value=codec.encode(OPENING), boundary="decode", reason="claim_missing")
    [name] = claims.stored
    if how == "missing":
        claims.stored.clear()
    elif how == "changed":
        claims.stored[name] = b"other"
    claims.is_down = how == "down"

    shown = opened(filed, codec)

    assert (None, name, "r-1") == (shown["record"], shown["claim"]["name"], shown["claim"]["rollout_id"])
    assert shown["claim"] == json.loads("\n".join(show_lines(shown)).partition("ClaimCheck:\n")[2])
    assert "claim" in shown["unreadable"]


@pytest.mark.parametrize(
    ("letter", "there", "why"),
    [
        ({}, {"p.calls.v1": 3}, None),
        ({}, {}, "is gone"),
        ({}, {"p.calls.v1": 6}, "has 6 partitions, and the settings say 3"),
        ({"partition": 3}, {"p.calls.v1": 3}, "came from partition 3"),
        ({"topic": "other.calls.v1"}, {"p.calls.v1": 3}, "none of prefix 'p'"),
    ],
)
def test_record_goes_back_only_where_its_group_lives(
    letter: dict[str, object], there: dict[str, int], why: str | None
) -> None:
    """Another number of partitions would put it where nobody sees it beside its group."""
    good, refused = sort_out([_filed(1, **letter)], prefix="p", expected={"p.calls.v1": 3}, there=there)

    assert len(good) == (why is None)
    assert [why in one.why for one in refused if why] == ([True] if why else [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", NOW_MS - 1_800_000),
        ("2h", NOW_MS - 7_200_000),
        ("1d", NOW_MS - 86_400_000),
        ("2023-11-14T22:13:20", NOW_MS),
        ("2023-11-14T23:13:20+01:00", NOW_MS),
    ],
)
def test_since_is_an_age_or_a_time(text: str, expected: int) -> None:
    """Ages count back from now; times are UTC unless they say otherwise."""
    assert parse_since(text, NOW_MS) == expected


def test_since_that_is_neither_says_what_is_expected() -> None:
    """The message shows both forms."""
    with pytest.raises(SettingsError, match="an age such as 30m"):
        parse_since("yesterday", NOW_MS)


def test_redrive_wants_to_be_told_which() -> None:
    """Nobody writes everything back by leaving an argument out."""
    result = CliRunner().invoke(cli, ["dlq", "redrive", "--yes"])

    assert result.exit_code == 2
    assert "say which dead letters" in result.output


def test_rebuild_wants_one_target() -> None:
    """Neither is an error, and so are both."""
    none = CliRunner().invoke(cli, ["rebuild", "--from", "calls"])
    both = CliRunner().invoke(cli, ["rebuild", "--from", "calls", "--to-prefix", "n", "--to-store", "chdb://x"])

    assert (none.exit_code, both.exit_code) == (2, 2)
    assert "give one of --to-prefix and --to-store" in none.output
