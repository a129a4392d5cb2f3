"""Which versions of a record may stand beside each other, checked without a registry.

    BACKWARD_TRANSITIVE   every version reads what every older one wrote: all records
    FULL_TRANSITIVE       and every older one reads what every newer one writes: what trainers read, since a training run keeps
                          its version for weeks

Avro's own rules are those of Apache's `avro` package. It does not look at logical types, and bytes that were packed as u32 must
never be read as f32, so those are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollstream.errors import SchemaError, boundary
from rollstream.schemas.codec import SchemaFile

FULL_TRANSITIVE = ("sample", "group_built")
"""Records whose older versions must read the newer ones, too."""


def check_versions(files: Mapping[tuple[str, int], SchemaFile]) -> list[str]:
    """Args: files: schemas by record name and version. Returns: what is wrong, a sentence each."""
    problems = []
    for name in sorted({record for record, _ in files}):
        versions = sorted(version for record, version in files if record == name)
        problems += [
            f"{name}.v{n} is missing, v{versions[-1]} is there" for n in range(1, versions[-1]) if n not in versions
        ]
        for older, newer in ((old, new) for old in versions for new in versions if old < new):
            problems += unreadable(files[name, newer], files[name, older])
            if name in FULL_TRANSITIVE:
                problems += unreadable(files[name, older], files[name, newer])
    return problems


def unreadable(reader: SchemaFile, writer: SchemaFile) -> list[str]:
    """Why a reader with one schema cannot read what was written with another; nothing if it can."""
    with boundary(SchemaError, "load the schema rules; install rollstream[registry]", reason="no_registry"):
        from avro.compatibility import ReaderWriterCompatibilityChecker
        from avro.schema import parse

    plain_reader, plain_writer = (parse(_without_logical_types(schema.text)) for schema in (reader, writer))
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    found = checker.get_compatibility(plain_reader, plain_writer)
    problems = [
        f"{kind.value} ({', '.join(sorted(found.messages))}) at {', '.join(sorted(found.locations))}"
        for kind in found.incompatibilities
    ]
    mine, theirs = (dict(_logical_types(json.loads(schema.text), "")) for schema in (reader, writer))
    problems += [
        f"{at or '/'} is {mine[at] or 'plain'}, and was written as {theirs[at] or 'plain'}"
        for at in mine
        if at in theirs and mine[at] != theirs[at]
    ]
    return [f"{reader.label} cannot read {writer.label}: {problem}" for problem in problems]


def _without_logical_types(text: str) -> str:
    """The package warns of each that it does not know."""
    return json.dumps(json.loads(text, object_hook=lambda d: {k: v for k, v in d.items() if k != "logicalType"}))


def _logical_types(schema: Any, at: str) -> Iterator[tuple[str, str]]:
    """The logical type of every field, empty where it has none, by its path."""
    if isinstance(schema, list):
        for branch in schema:
            if branch != "null":
                yield from _logical_types(branch, at)
    elif isinstance(schema, dict) and schema["type"] == "record":
        for field in schema["fields"]:
            yield from _logical_types(field["type"], f"{at}/{field['name']}")
    elif isinstance(schema, dict) and schema["type"] == "array":
        yield from _logical_types(schema["items"], f"{at}[]")
    else:
        yield at, schema.get("logicalType", "") if isinstance(schema, dict) else ""
