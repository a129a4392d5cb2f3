"""Dead letters as an operator looks at them: which ones, how they are shown, and where each may go back to. Pure.

The topic `dead-letters` is the source; `dead_letter_topic.py` reads and writes it, `dlq.py` is the command line. A dead
letter may stand in its topic twice: a worker that was killed between writing and committing writes it again, and may by then
have another reason (a `conflict` of a rollout that is closed meanwhile is `late`). The first one counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rollstream.errors import BrokerError, SchemaError, SettingsError
from rollstream.schemas.codec import Codec, claim_name
from rollstream.schemas.readable import to_readable
from rollstream.schemas.records import DeadLetter
from rollstream.schemas.topics import topics

ID_CHARACTERS = 12
"""Characters of an id that a list shows; any beginning of an id that names only one is good everywhere."""

_HEX_BYTES = 256
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True)
class Filed:
    """A dead letter where it stands."""

    letter: DeadLetter
    """The dead letter; in a list its `value` is left out."""
    size_bytes: int
    """Bytes of the original record."""
    filed_ms: int
    """When it was written to its topic, UTC epoch milliseconds."""
    partition: int
    """Partition of the topic `dead-letters`."""
    offset: int
    """Offset there."""

    def without_value(self) -> Filed:
        """The same without the original's bytes."""
        return replace(self, letter=replace(self.letter, value=b""))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters; None and () select all."""

    reason: str | None = None
    """Reason code."""
    boundary: str | None = None
    """Where it failed."""
    topic: str | None = None
    """Source topic, as a noun (`calls`) or a full name."""
    rollout: str | None = None
    """Rollout id."""
    since_ms: int | None = None
    """Filed at or after this time, UTC epoch milliseconds."""
    ids: tuple[str, ...] = ()
    """Ids, or the beginnings of ids."""

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self == Selection()

    def takes(self, filed: Filed) -> bool:
        """Whether a dead letter is selected."""
        letter = filed.letter
        return (
            self.reason in (None, letter.reason)
            and self.boundary in (None, letter.boundary)
            and self.topic in (None, letter.topic, noun_of(letter.topic))
            and self.rollout in (None, letter.rollout_id)
            and (self.since_ms is None or filed.filed_ms >= self.since_ms)
            and (not self.ids or letter.dead_letter_id.startswith(self.ids))
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A dead letter that cannot go back, and why."""

    filed: Filed
    """The dead letter."""
    why: str
    """What is wrong and what to do."""


def parse_since(text: str, now_ms: int) -> int:
    """A point in time, UTC epoch milliseconds.

    Args: text: an age (`30m`, `2h`, `1d`), or a time in ISO 8601 (`2025-03-01T02:00`), UTC where it names no zone.
    Raises: SettingsError: it is neither.
    """
    age = re.fullmatch(r"(\d+)([smhd])", text)
    if age is not None:
        return now_ms - int(age[1]) * _UNIT_MS[age[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(
            f"cannot tell what time --since={text!r} is: expected an age such as 30m, 2h or 1d, or a time such as "
            "2025-03-01T02:00"
        ) from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def noun_of(topic: str) -> str:
    """The noun in a topic's full name; the name itself where it is none of ours."""
    parts = topic.rsplit(".", 2)
    return parts[1] if len(parts) == 3 and parts[1] in topics() else topic


def select(found: Iterable[Filed], selection: Selection) -> list[Filed]:
    """The selected ones, oldest first; of each record the first that one boundary has filed."""
    kept: dict[tuple[str, int, int, str], Filed] = {}
    for filed in found:
        if selection.takes(filed):
            letter = filed.letter
            kept.setdefault((letter.topic, letter.partition, letter.offset, letter.boundary), filed)
    return sorted(kept.values(), key=lambda filed: (filed.filed_ms, filed.partition, filed.offset))


def check_ids(ids: Sequence[str], found: Sequence[Filed]) -> None:
    """Return if each id names exactly one dead letter.

    Raises: SettingsError: one names none, or several.
    """
    for wanted in ids:
        named = [filed.letter.dead_letter_id for filed in found if filed.letter.dead_letter_id.startswith(wanted)]
        if not named:
            raise SettingsError(
                f"there is no dead letter {wanted!r}; `rollstream dlq list --limit 0` shows all that the topic still holds"
            )
        if len(named) > 1:
            raise SettingsError(
                f"dead letter id {wanted!r} names {len(named)}: {', '.join(named[:5])}; give more of it"
            )


def list_lines(found: Sequence[Filed], limit: int) -> list[str]:
    """A table, newest last, and how many there are by boundary and reason.

    Args: limit: most rows, the newest; 0 shows all. The counts are over all of `found`.
    """
    shown = found[-limit:] if limit else found
    rows = [("filed (UTC)", "id", "boundary", "reason", "source", "rollout", "bytes")]
    for filed in shown:
        letter = filed.letter
        rows.append(
            (
                _time(filed.filed_ms),
                letter.dead_letter_id[:ID_CHARACTERS],
                letter.boundary,
                letter.reason,
                _source(letter),
                letter.rollout_id or "-",
                str(filed.size_bytes),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(shown) < len(found):
        lines.append(f"... and {len(found) - len(shown)} older ones; --limit 0 shows all")
    lines.append("")
    lines += [f"{number:>7}  {boundary}: {reason}" for (boundary, reason), number in counts(found)]
    return [*lines, f"{len(found):>7}  in all"] if found else ["no dead letters"]


def counts(found: Iterable[Filed]) -> list[tuple[tuple[str, str], int]]:
    """How many by (boundary, reason), most first."""
    return sorted(
        Counter((filed.letter.boundary, filed.letter.reason) for filed in found).items(),
        key=lambda one: (-one[1], one[0]),
    )


def as_json(filed: Filed) -> dict[str, Any]:
    """The facts of a dead letter, without the original's bytes."""
    letter = filed.letter
    return {
        "dead_letter_id": letter.dead_letter_id,
        "filed_ms": filed.filed_ms,
        "boundary": letter.boundary,
        "reason": letter.reason,
        "message": letter.message,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "key": None if letter.key is None else letter.key.decode("utf-8", "backslashreplace"),
        "at_ms": letter.at_ms,
        "rollout_id": letter.rollout_id,
        "call_id": letter.call_id,
        "size_bytes": filed.size_bytes,
        "dead_letter_partition": filed.partition,
        "dead_letter_offset": filed.offset,
    }


def opened(filed: Filed, codec: Codec) -> dict[str, Any]:
    """All of a dead letter: its facts, and the original record where it can be read. Else why not, with the claim check that
    stands in the record's place if it was a large one, and with the first bytes.
    """
    found, value = as_json(filed), filed.letter.value
    try:
        record = codec.decode(value)
    except (SchemaError, BrokerError) as error:
        check = codec.claim_check(value)
        claim = {} if check is None else {"claim": {"name": claim_name(check.digest), **asdict(check)}}
        return {**found, "record": None, "unreadable": str(error), **claim, "hex": value[:_HEX_BYTES].hex()}
    return {**found, "record_type": type(record).__name__, "record": to_readable(record)}


def show_lines(shown: Mapping[str, Any]) -> list[str]:
    """What `opened` found, for people."""
    record, unreadable = shown["record"], shown.get("unreadable")
    facts = {k: v for k, v in shown.items() if k not in ("record", "record_type", "unreadable", "claim", "hex")}
    width = max(map(len, facts))
    lines = [f"{name.ljust(width)}  {'-' if value is None else _told(name, value)}" for name, value in facts.items()]
    if record is not None:
        return [*lines, "", f"{shown['record_type']}:", json.dumps(record, indent=2, ensure_ascii=False)]
    head = bytes.fromhex(shown["hex"])
    lines += ["", f"unreadable: {unreadable}"]
    if "claim" in shown:
        return [*lines, "", "ClaimCheck:", json.dumps(shown["claim"], indent=2)]
    lines += [f"first {len(head)} of {shown['size_bytes']} bytes:"]
    for at in range(0, len(head), 16):
        part = head[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:06x}  {part.hex(' ').ljust(47)}  {text}")
    return lines


def sort_out(
    found: Iterable[Filed], *, prefix: str, expected: Mapping[str, int], there: Mapping[str, int]
) -> tuple[list[Filed], list[Refused]]:
    """Which dead letters may be written back to where they came from.

    Args:
        prefix: of the topics.
        expected: topic → partitions that the settings say it has.
        there: topic → partitions that it has; a topic that is gone is not in it.
    """
    good: list[Filed] = []
    refused: list[Refused] = []
    for filed in found:
        why = _refusal(filed.letter, prefix, expected, there)
        if why is None:
            good.append(filed)
        else:
            refused.append(Refused(filed, why))
    return good, refused


def _refusal(letter: DeadLetter, prefix: str, expected: Mapping[str, int], there: Mapping[str, int]) -> str | None:
    name = letter.topic
    if name not in expected:
        return f"topic {name} is none of prefix {prefix!r}; set kafka.prefix to that of the topic"
    if name not in there:
        return f"topic {name} is gone; `rollstream topics apply` makes it anew"
    if there[name] != expected[name]:
        return (
            f"topic {name} has {there[name]} partitions, and the settings say {expected[name]}: with another number the group "
            "lives elsewhere; set kafka.partitions to what the topic had when the record was written"
        )
    if letter.partition >= there[name]:
        return (
            f"it came from partition {letter.partition} of {name}, which has {there[name]}: the topic was made anew with "
            "fewer, and the group lives elsewhere now"
        )
    return None


def _source(letter: DeadLetter) -> str:
    return f"{noun_of(letter.topic)}[{letter.partition}]@{letter.offset}"


def _time(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return str(at_ms)


def _told(name: str, value: Any) -> str:
    return f"{value} ({_time(value)} UTC)" if name.endswith("_ms") else str(value)
