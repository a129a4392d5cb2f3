"""A record that was read but not made: its class and its fields, for those who need few of them.

To make a `ModelCall` of what Avro has read takes almost as long as to read it, and a worker that comes back reads thousands
of calls only to know whose they are. Whoever needs the record makes it.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from rollstream.schemas.derive import converters


class Fields(Protocol):
    """Values by the name of the field. Of a record that is not made, enums are text and nested records are dicts."""

    def __getitem__(self, name: str, /) -> Any: ...


class Parsed:
    """A record as its bytes have it, wholly checked."""

    __slots__ = ("cls", "values")

    def __init__(self, cls: type, values: dict[str, Any]) -> None:
        self.cls = cls
        """The class it belongs to."""
        self.values = values
        """Its fields."""

    def make(self) -> Any:
        """The record."""
        return converters(self.cls)[1](self.values)


class _Made:
    """The fields of a record that is made."""

    __slots__ = ("_record",)

    def __init__(self, record: object) -> None:
        self._record = record

    def __getitem__(self, name: str) -> Any:
        return getattr(self._record, name)


def class_of(record: object) -> type:
    """The class of a record, made or not."""
    return record.cls if isinstance(record, Parsed) else type(record)


@functools.cache
def field_names(cls: type) -> frozenset[str]:
    """Names of the fields of a record's class."""
    return frozenset(getattr(cls, "__dataclass_fields__", ()))


def fields_of(record: object) -> Fields:
    """The fields of a record, made or not, or of a nested one."""
    if isinstance(record, Parsed):
        return record.values
    return record if isinstance(record, dict) else _Made(record)
