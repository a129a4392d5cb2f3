"""Records to bytes and back.

Two framings, and a reader accepts both:

* Avro single-object encoding, without a registry: `C3 01`, the schema's CRC-64-AVRO fingerprint (8 bytes, little
  endian), the body. Source: Avro 1.12 specification, "Single-object encoding".
* Confluent's, with a registry: `00`, the registry's schema id (4 bytes, big endian), the body.

Every schema version ever released is in `avro/`, so what an older or newer writer wrote is resolved to the newest class. A
writer whose schema is not known here is an error with reason `unknown_schema`, never a guess.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Protocol, TypeVar

import fastavro
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from rollstream.errors import SchemaError, boundary
from rollstream.schemas.derive import converters
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.records import RECORDS, Record

_SINGLE_OBJECT = b"\xc3\x01"
_CONFLUENT = b"\x00"
_FILE_NAME = re.compile(r"^(?P<record>[a-z_]+)\.v(?P<version>[0-9]+)\.avsc$")

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """One `.avsc` file."""

    record: str
    """Record name, for instance `model_call`."""
    version: int
    """Version, from 1."""
    text: str
    """The file's text."""
    parsed: Any
    """What fastavro reads and writes with."""
    fingerprint: bytes
    """CRC-64-AVRO of the parsing canonical form, 8 bytes, little endian."""


class Registry(Protocol):
    """What the codec needs of a schema registry."""

    def schema_id(self, schema: SchemaFile) -> int:
        """The id under which the registry knows a schema."""

    def schema_text(self, schema_id: int) -> str:
        """The schema behind an id. Raises: SchemaError: the registry has none."""


@functools.cache
def schema_files() -> dict[tuple[str, int], SchemaFile]:
    """Every released schema, by record name and version."""
    found: dict[tuple[str, int], SchemaFile] = {}
    for file in resources.files("rollstream.schemas").joinpath("avro").iterdir():
        match = _FILE_NAME.match(file.name)
        if match is None:
            raise SchemaError(
                f"cannot read schemas: {file.name!r} is in avro/, expected only <record>.v<N>.avsc files",
                reason="bad_schema_file",
            )
        schema = read_schema(match["record"], int(match["version"]), file.read_text("utf-8"))
        found[schema.record, schema.version] = schema
    return found


def read_schema(record: str, version: int, text: str) -> SchemaFile:
    """Parse the text of one `.avsc` file."""
    raw = json.loads(text)
    crc = bytes.fromhex(fingerprint(to_parsing_canonical_form(raw), "CRC-64-AVRO"))
    return SchemaFile(record, version, text, parse_schema(raw), crc)


@functools.cache
def newest_schema(record: str) -> SchemaFile:
    """The schema that a record is written with."""
    versions = [v for name, v in schema_files() if name == record]
    if not versions:
        raise SchemaError(
            f"cannot find a schema of {record!r}: expected one of {sorted(RECORDS)}", reason="unknown_schema"
        )
    return schema_files()[record, max(versions)]


_NAMES = {cls: name for name, cls in RECORDS.items()}


def record_name(cls: type[Record]) -> str:
    """`ModelCall` → `model_call`."""
    try:
        return _NAMES[cls]
    except KeyError:
        raise SchemaError(
            f"cannot encode {cls.__name__}: expected one of {sorted(RECORDS)}", reason="unknown_schema"
        ) from None


def encode_body(record: Record) -> bytes:
    """The record in Avro's binary form, without any framing: what digests are computed over.

    Raises: SchemaError: a field's value does not fit its type.
    """
    schema = newest_schema(record_name(type(record)))
    out = io.BytesIO()
    try:
        fastavro.schemaless_writer(out, schema.parsed, converters(type(record))[0](record), strict=True)
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as cause:
        raise SchemaError(
            f"cannot encode {type(record).__name__}: {cause}; compare the record with {schema.record}.v{schema.version}",
            reason="bad_field",
        ) from cause
    return out.getvalue()


def with_digest(record: R) -> R:
    """The record with its `digest` field set to the blake2b-128 of its body with an empty digest."""
    return replace(record, digest=digest_bytes(encode_body(replace(record, digest=""))))  # type: ignore[arg-type]


class Codec:
    """Encodes and decodes records; holds the registry, if there is one, and what it has told so far."""

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._by_fingerprint = {s.fingerprint: s for s in schema_files().values()}
        self._by_id: dict[int, SchemaFile] = {}
        self._prefixes: dict[str, bytes] = {}

    def encode(self, record: Record) -> bytes:
        """Frame and body of a record.

        Raises: SchemaError: a field's value does not fit, or the registry does not know the schema.
        """
        return self._prefix(record_name(type(record))) + encode_body(record)

    def decode(self, data: bytes) -> Record:
        """The record behind the bytes, in its newest class.

        Raises: SchemaError: reason `unknown_framing`, `unknown_schema` or `malformed`.
        """
        writer, start = self._writer(data)
        reader = newest_schema(writer.record)
        body = io.BytesIO(data)
        body.seek(start)
        what = f"decode {writer.record}.v{writer.version}, whose {len(data)} bytes were cut short or damaged"
        with boundary(SchemaError, what, reason="malformed"):
            values = fastavro.schemaless_reader(body, writer.parsed, None if writer is reader else reader.parsed)
            record: Record = converters(RECORDS[writer.record])[1](values)
        rest = len(data) - body.tell()
        if rest:
            raise SchemaError(
                f"cannot decode {writer.record}.v{writer.version}: {rest} bytes are left over of {len(data)}; "
                "the record is damaged",
                reason="malformed",
            )
        return record

    def _prefix(self, record: str) -> bytes:
        if record not in self._prefixes:
            schema = newest_schema(record)
            self._prefixes[record] = (
                _SINGLE_OBJECT + schema.fingerprint
                if self._registry is None
                else _CONFLUENT + self._registry.schema_id(schema).to_bytes(4, "big")
            )
        return self._prefixes[record]

    def _writer(self, data: bytes) -> tuple[SchemaFile, int]:
        if data[:2] == _SINGLE_OBJECT and len(data) >= 10:
            schema = self._by_fingerprint.get(bytes(data[2:10]))
            if schema is None:
                raise SchemaError(
                    f"cannot decode: schema fingerprint {data[2:10].hex()} is not known here; the writer is newer or "
                    "foreign, update rollstream where this ran",
                    reason="unknown_schema",
                )
            return schema, 10
        if data[:1] == _CONFLUENT and len(data) >= 5:
            return self._registered(int.from_bytes(data[1:5], "big")), 5
        raise SchemaError(
            f"cannot decode: the bytes start with {bytes(data[:2]).hex() or 'nothing'}, expected c301 (Avro "
            "single-object) or 00 (Confluent)",
            reason="unknown_framing",
        )

    def _registered(self, schema_id: int) -> SchemaFile:
        if schema_id not in self._by_id:
            if self._registry is None:
                raise SchemaError(
                    f"cannot decode: the bytes name registry schema {schema_id}, and no registry is set; set "
                    "ROLLSTREAM_KAFKA__REGISTRY_URL",
                    reason="unknown_schema",
                )
            raw = json.loads(self._registry.schema_text(schema_id))
            crc = bytes.fromhex(fingerprint(to_parsing_canonical_form(raw), "CRC-64-AVRO"))
            if crc not in self._by_fingerprint:
                raise SchemaError(
                    f"cannot decode: registry schema {schema_id} is {raw.get('name')!r} in a version not known here; "
                    "update rollstream where this ran",
                    reason="unknown_schema",
                )
            self._by_id[schema_id] = self._by_fingerprint[crc]
        return self._by_id[schema_id]
