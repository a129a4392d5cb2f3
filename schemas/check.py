"""Checks of the schema files: what `rollstream schemas check` and the tests run.

Each check returns the problems it found as sentences; an empty list is a pass.
"""

from __future__ import annotations

import json
from importlib import resources

from rollstream.errors import SchemaError
from rollstream.schemas.codec import CLASSES, Codec, newest_schema, schema_files
from rollstream.schemas.compatibility import check_versions
from rollstream.schemas.derive import derive_schema, field_docs
from rollstream.schemas.readable import from_readable
from rollstream.schemas.records import RECORDS
from rollstream.schemas.topics import topics

_IN_ANY_TOPIC = ("claim_check",)


def check_all() -> list[str]:
    """Every check."""
    return [*check_classes(), *check_docs(), *check_topics(), *check_examples(), *check_compatibility()]


def check_classes() -> list[str]:
    """Each record class equals its newest schema file."""
    problems = []
    for name, cls in CLASSES.items():
        schema = newest_schema(name)
        if json.loads(schema.text) != derive_schema(cls):
            problems.append(
                f"{cls.__name__} differs from avro/{name}.v{schema.version}.avsc: a released file is never edited, add "
                f"{name}.v{schema.version + 1}.avsc with `rollstream schemas write`"
            )
    return problems


def check_docs() -> list[str]:
    """Every field of every record says what it is."""
    return [
        f"{cls.__name__}.{field} has no docstring"
        for cls in CLASSES.values()
        for field in cls.__dataclass_fields__
        if not field_docs(cls).get(field)
    ]


def check_topics() -> list[str]:
    """Every record has a topic, and every topic's key is a field of its records or of their group."""
    problems = []
    held = {name for topic in topics().values() for name in topic.records}
    problems += [f"record {name} is in no topic file" for name in RECORDS if name not in held]
    for topic in topics().values():
        for name in topic.records:
            fields = RECORDS[name].__dataclass_fields__
            if topic.key not in fields and "group" not in fields:
                problems.append(f"topic {topic.noun} is keyed by {topic.key}, and {name} has no such field")
    return problems


def check_examples() -> list[str]:
    """Each topic has examples; those named `.pass.json` round-trip, those named `.fail.json` fail for their reason."""
    problems = []
    codec = Codec()
    for topic in topics().values():
        folder = resources.files("rollstream.schemas").joinpath("examples", topic.noun, f"v{topic.version}")
        files = sorted(folder.iterdir(), key=lambda f: f.name) if folder.is_dir() else []
        for kind in (".pass.json", ".fail.json"):
            if not any(file.name.endswith(kind) for file in files):
                problems.append(f"examples/{topic.noun}/v{topic.version} has no *{kind}")
        for file in files:
            case = json.loads(file.read_text("utf-8"))
            where = f"examples/{topic.noun}/v{topic.version}/{file.name}"
            if case["record"] not in (*topic.records, *_IN_ANY_TOPIC):
                problems.append(f"{where} holds a {case['record']}, which is not in topic {topic.noun}")
                continue
            try:
                record = from_readable(CLASSES[case["record"]], case["value"])
                if codec.decode_frame(codec.frame(record)) != record:
                    problems.append(f"{where} changes on its way through the codec")
                found = None
            except SchemaError as error:
                found = str(error)
            if file.name.endswith(".pass.json") and found is not None:
                problems.append(f"{where} fails: {found}")
            if file.name.endswith(".fail.json") and case["error_contains"] not in (found or ""):
                problems.append(f"{where} should fail with {case['error_contains']!r}, got {found!r}")
    return problems


def check_compatibility() -> list[str]:
    """Every version of a record goes with every other one as `compatibility` demands it of that record."""
    return check_versions(schema_files())
