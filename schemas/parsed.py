"""A record that was read but not made: its class and its fields, for those who need few of them.

To make a `ModelCall` of what Avro has read takes almost as long as to read it, and a worker that comes back reads thousands
of calls only to know whose they are. Whoever needs the record makes it.
"""

from __future__ import annotations

from typing import Any

from rollstream.schemas.derive import converters


class Fields:
    """Fields that read like a record's, but for enums, which are text, and tuples, which are lists."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            value = self._values[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}", name=name, obj=self) from None
        return Fields(value) if type(value) is dict else value


class Parsed(Fields):
    """A record as its bytes have it, wholly checked."""

    __slots__ = ("cls",)

    def __init__(self, cls: type, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.cls = cls
        """The class it belongs to."""

    def make(self) -> Any:
        """The record."""
        return converters(self.cls)[1](self._values)


def class_of(record: object) -> type:
    """The class of a record, made or not."""
    return record.cls if isinstance(record, Parsed) else type(record)
