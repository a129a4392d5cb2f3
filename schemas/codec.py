"""Records to bytes and back.

Two framings, and a reader accepts both:

* Avro single-object encoding, without a registry: `C3 01`, the schema's CRC-64-AVRO fingerprint (8 bytes, little
  endian), the body. Source: Avro 1.12 specification, "Single-object encoding".
* Confluent's, with a registry: `00`, the registry's schema id (4 bytes, big endian), the body.

Every schema version ever released is in `avro/`, so what an older writer wrote is resolved to the newest class. What a newer
writer wrote is resolved, too, if a registry gives its schema and Avro's rules allow it. Any other writer's schema is an error
with reason `unknown_schema`, never a guess.

A record whose bytes are more than `inline_bytes` goes into the claim store, and what is framed is a `ClaimCheck` that names it.
`decode` fetches and verifies it; the same record gives the same bytes, with a claim or without.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple, Protocol, TypeVar

import fastavro
from fastavro.read import SchemaResolutionError
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.schemas.derive import NAMESPACE, converters
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.parsed import Parsed
from rollstream.schemas.records import RECORDS, Record
from rollstream.schemas.records.claims import ClaimCheck

_SINGLE_OBJECT = b"\xc3\x01"
_CONFLUENT = b"\x00"
_FILE_NAME = re.compile(r"^(?P<record>[a-z_]+)\.v(?P<version>[0-9]+)\.avsc$")

AT_HAND_BYTES = 64 << 20
"""Claims that were read ahead and are kept: of the newest, as many as fit, and one in any case."""

R = TypeVar("R", bound=Record)

CLASSES: dict[str, type[Record | ClaimCheck]] = {**RECORDS, "claim_check": ClaimCheck}
"""Schema file name without version → class of its newest version: the records, and what stands for a large one."""


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """One `.avsc` file."""

    record: str
    """Record name, for instance `model_call`."""
    version: int
    """Version, from 1; 0: a writer's, from a registry, that is not among ours."""
    text: str
    """The file's text."""
    parsed: Any
    """What fastavro reads and writes with."""
    fingerprint: bytes
    """CRC-64-AVRO of the parsing canonical form, 8 bytes, little endian."""

    @property
    def label(self) -> str:
        """As messages call it, for instance `model_call.v1`."""
        return f"{self.record}.v{self.version}" if self.version else f"{self.record} in a version not known here"


class _Way(NamedTuple):
    """How what was written with one schema is read."""

    writer: SchemaFile
    """The schema."""
    reader: Any
    """What fastavro resolves it to; None if it is the newest."""
    cls: type[Record | ClaimCheck]
    """The class it is read into."""
    what: str
    """What has failed when it fails."""


class Registry(Protocol):
    """What the codec needs of a schema registry."""

    def schema_id(self, schema: SchemaFile) -> int:
        """The id under which the registry knows a schema."""

    def schema_text(self, schema_id: int) -> str:
        """The schema behind an id. Raises: SchemaError: the registry has none."""


class Claims(Protocol):
    """What the codec needs of a claim store."""

    def put(self, name: str, data: bytes) -> None:
        """Store a claim. Raises: BrokerError: reason `claims_down`."""

    async def put_async(self, name: str, data: bytes) -> None:
        """As `put`."""

    def get(self, name: str) -> bytes:
        """A claim's content. Raises: SchemaError: reason `claim_missing`. BrokerError: reason `claims_down`."""

    async def get_async(self, name: str) -> bytes:
        """As `get`."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What has to be in the claim store before the check for it goes to Kafka."""

    name: str
    """Its name in the store."""
    data: bytes
    """The framed record."""


def claim_name(digest: str) -> str:
    """Where a claim is in the store."""
    return f"claims/{digest[:2]}/{digest}"


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
    return SchemaFile(record, version, text, _with_bytes(parse_schema(raw)), crc)


def _with_bytes(schema: Any) -> Any:
    """A schema whose defaults of bytes are bytes: fastavro hands a default out as it stands in the file, which is text."""
    if isinstance(schema, list):
        return [_with_bytes(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    values = {name: _with_bytes(value) for name, value in schema.items()}
    kind = values.get("type")
    is_bytes = kind == "bytes" or (isinstance(kind, dict) and kind.get("type") == "bytes")
    if is_bytes and isinstance(values.get("default"), str):
        values["default"] = values["default"].encode("latin-1")
    return values


@functools.cache
def newest_schema(record: str) -> SchemaFile:
    """The schema that a record is written with."""
    return released().newest(record)


@dataclass(frozen=True)
class Catalog:
    """The schemas that a codec knows, and the class that each is read into."""

    files: Mapping[tuple[str, int], SchemaFile]
    """By record name and version."""
    classes: Mapping[str, type]
    """By record name, for its newest version."""

    def newest(self, record: str) -> SchemaFile:
        """The schema that a record is written with, and read into.

        Raises: SchemaError: reason `unknown_schema`: there is none.
        """
        versions = [version for name, version in self.files if name == record]
        if not versions:
            raise SchemaError(
                f"cannot find a schema of {record!r}: expected one of {sorted(self.classes)}", reason="unknown_schema"
            )
        return self.files[record, max(versions)]


@functools.cache
def released() -> Catalog:
    """What this version of rollstream knows."""
    return Catalog(schema_files(), CLASSES)


_NAMES = {cls: name for name, cls in CLASSES.items()}


def record_name(cls: type[Record | ClaimCheck]) -> str:
    """`ModelCall` → `model_call`."""
    try:
        return _NAMES[cls]
    except KeyError:
        raise SchemaError(
            f"cannot encode {cls.__name__}: expected one of {sorted(RECORDS)}", reason="unknown_schema"
        ) from None


def encode_body(record: Record | ClaimCheck) -> bytes:
    """The record in Avro's binary form, without any framing: what digests are computed over.

    Raises: SchemaError: a field's value does not fit its type.
    """
    return _body(record, newest_schema(record_name(type(record))))


def _body(record: Any, schema: SchemaFile) -> bytes:
    out = io.BytesIO()
    try:
        fastavro.schemaless_writer(out, schema.parsed, converters(type(record))[0](record), strict=True)
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as cause:
        raise SchemaError(
            f"cannot encode {type(record).__name__}: {cause}; compare the record with {schema.label}",
            reason="bad_field",
        ) from cause
    return out.getvalue()


def with_digest(record: R) -> R:
    """The record with its `digest` field set to the blake2b-128 of its body with an empty digest."""
    return replace(record, digest=digest_bytes(encode_body(replace(record, digest=""))))  # type: ignore[arg-type]


class Codec:
    """Encodes and decodes records; holds the registry, if there is one, and what it has told so far."""

    def __init__(
        self,
        registry: Registry | None = None,
        claims: Claims | None = None,
        *,
        inline_bytes: int | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        """Args:
        claims: where large records go; None leaves every record whole, and reads no claim.
        inline_bytes: a record whose framed bytes are more than this goes there; None: none does.
        catalog: other schemas than the released ones, for tests of what older and newer programs read.
        """
        self._registry = registry
        self._claims = claims
        self._inline_bytes = None if claims is None else inline_bytes
        self._catalog = catalog or released()
        self._names = {cls: name for name, cls in self._catalog.classes.items()}
        self._newest = {name: self._catalog.newest(name) for name in self._catalog.classes}
        self._by_fingerprint = {schema.fingerprint: self._way_of(schema) for schema in self._catalog.files.values()}
        self._by_id: dict[int, _Way] = {}
        self._prefixes: dict[str, bytes] = {}
        self._at_hand: OrderedDict[str, bytes] = OrderedDict()
        self._at_hand_bytes = 0

    def encode(self, record: Record) -> bytes:
        """What stands in Kafka for a record. Blocks while a large one is written to the claim store.

        Raises: SchemaError: a field's value does not fit, or the registry does not know the schema. BrokerError: reason
            `claims_down` or `registry_down`.
        """
        value, claim = self.pack(record)
        if claim is not None:
            self.store(claim)
        return value

    def pack(self, record: Record) -> tuple[bytes, Claim | None]:
        """As `encode`, but stores nothing.

        Returns: the value, and what has to be stored before it is sent.
        """
        framed = self.frame(record)
        if self._inline_bytes is None or len(framed) <= self._inline_bytes:
            return framed, None
        digest = digest_bytes(framed)
        check = ClaimCheck(
            self._name(record),
            digest,
            len(framed),
            getattr(record, "rollout_id", None),
            getattr(record, "call_id", None),
        )
        return self.frame(check), Claim(claim_name(digest), framed)

    def store(self, claim: Claim) -> None:
        """Put a claim into the store. Raises: BrokerError: reason `claims_down`."""
        self._claim_store().put(claim.name, claim.data)

    async def store_async(self, claim: Claim) -> None:
        """As `store`, without blocking the event loop."""
        await self._claim_store().put_async(claim.name, claim.data)

    def learn(self) -> None:
        """Have the registry's ids of all schemas that are written, so that encoding asks nobody. Blocks.

        Raises: SchemaError: reason `not_registered`. BrokerError: reason `registry_down`.
        """
        for name in self._newest:
            self._prefix(name)

    def is_claim(self, data: bytes) -> bool:
        """Whether a claim check stands in Kafka. Asks nobody: of a registry's id that was not met yet it says no."""
        way = (
            self._by_fingerprint.get(bytes(data[2:10]))
            if data[:2] == _SINGLE_OBJECT
            else self._by_id.get(int.from_bytes(data[1:5], "big"))
        )
        return way is not None and way.cls is ClaimCheck

    def claimed_bytes(self, data: bytes) -> int:
        """How many more bytes `decode` reads: those of the claim that is named here. Asks nobody, as `is_claim`."""
        check = self.claim_check(data) if self.is_claim(data) else None
        return 0 if check is None else check.size_bytes

    async def read_ahead(self, data: bytes) -> None:
        """Fetch what a claim check names, so that decoding it does not block: now, and for as long as the newest claims that were
        fetched have no more than `AT_HAND_BYTES` together. What is wrong with it is left for `decode` to find.

        Raises: BrokerError: reason `claims_down`.
        """
        check = self.claim_check(data)
        if check is None:
            return
        name = claim_name(check.digest)
        with suppress(SchemaError):
            content = await self._claim_store().get_async(name)
            if digest_bytes(content) == check.digest:
                self._keep(name, content)

    def decode(self, data: bytes) -> Record:
        """The record behind the bytes, in its newest class. Blocks while a claim is read.

        Raises: SchemaError: reason `unknown_framing`, `unknown_schema`, `malformed`, `claim_missing` or `claim_mismatch`.
            BrokerError: reason `claims_down` or `registry_down`: nothing is known about the bytes.
        """
        record: Record = self.parse(data).make()
        return record

    def parse(self, data: bytes) -> Parsed:
        """As `decode`, but leaves it open to make the record: whatever is wrong with the bytes is found here."""
        parsed = self._parse_frame(data)
        return self._resolve(parsed.make()) if parsed.cls is ClaimCheck else parsed

    def decode_again(self, data: bytes) -> Record:
        """What `decode` gave before. A claim that has vanished since stops the process; the next one meets it as `decode` does.

        Raises: BrokerError: reason `claims_down` or `registry_down`.
        """
        try:
            return self.decode(data)
        except SchemaError as cause:
            raise BrokerError(
                f"what could be decoded before cannot be any more: {cause}", reason="claims_down"
            ) from cause

    def decode_frame(self, data: bytes) -> Record | ClaimCheck:
        """What stands in Kafka: the record, or the check for its claim, which is not read.

        Raises: as `decode`, but for claims.
        """
        record: Record | ClaimCheck = self._parse_frame(data).make()
        return record

    def _parse_frame(self, data: bytes) -> Parsed:
        way, start = self._way(data)
        body = io.BytesIO(data)
        body.seek(start)
        with boundary(SchemaError, way.what, reason="malformed"):
            try:
                values: Any = fastavro.schemaless_reader(body, way.writer.parsed, way.reader)
            except SchemaResolutionError as cause:
                raise SchemaError(
                    f"cannot decode {way.writer.label} as {self._newest[way.writer.record].label}: {cause}; update rollstream "
                    "where this ran, then redrive",
                    reason="unknown_schema",
                ) from cause
        rest = len(data) - body.tell()
        if rest:
            raise SchemaError(
                f"cannot decode {way.writer.label}: {rest} bytes are left over of {len(data)}; the record is damaged",
                reason="malformed",
            )
        return Parsed(way.cls, values)

    def claim_check(self, data: bytes) -> ClaimCheck | None:
        """The check that stands in Kafka; None if a record stands there, or nothing that can be read."""
        try:
            found = self.decode_frame(data)
        except SchemaError:
            return None
        return found if isinstance(found, ClaimCheck) else None

    def _resolve(self, check: ClaimCheck) -> Parsed:
        name = claim_name(check.digest)
        data = self._at_hand[name] if name in self._at_hand else self._claim_store().get(name)
        found = digest_bytes(data)
        if found != check.digest:
            raise SchemaError(
                f"cannot decode: claim {name!r} has {len(data)} bytes with the digest {found}, expected {check.size_bytes} bytes "
                "with the one in its name; it was changed, restore it and redrive",
                reason="claim_mismatch",
            )
        parsed = self._parse_frame(data)
        if parsed.cls is ClaimCheck:
            raise SchemaError(
                f"cannot decode: claim {name!r} holds another claim check, expected a record; no writer of ours makes that",
                reason="malformed",
            )
        return parsed

    def _keep(self, name: str, data: bytes) -> None:
        self._at_hand_bytes += len(data) - len(self._at_hand.pop(name, b""))
        self._at_hand[name] = data
        while self._at_hand_bytes > AT_HAND_BYTES and len(self._at_hand) > 1:
            self._at_hand_bytes -= len(self._at_hand.popitem(last=False)[1])

    def _claim_store(self) -> Claims:
        if self._claims is None:
            raise BrokerError(
                "a claim was met, and no claim store is set; open the codec with one", reason="claims_down"
            )
        return self._claims

    def _name(self, record: Record | ClaimCheck) -> str:
        try:
            return self._names[type(record)]
        except KeyError:
            return record_name(type(record))  # tells that there is none

    def frame(self, record: Record | ClaimCheck) -> bytes:
        """Frame and body, whatever the size. Raises: as `encode`, but for claims."""
        name = self._name(record)
        return self._prefix(name) + _body(record, self._newest[name])

    def _prefix(self, record: str) -> bytes:
        if record not in self._prefixes:
            schema = self._newest[record]
            self._prefixes[record] = (
                _SINGLE_OBJECT + schema.fingerprint
                if self._registry is None
                else _CONFLUENT + self._registry.schema_id(schema).to_bytes(4, "big")
            )
        return self._prefixes[record]

    def _way_of(self, writer: SchemaFile) -> _Way:
        newest = self._newest[writer.record]
        what = f"decode {writer.label}, whose bytes were cut short or damaged"
        return _Way(writer, None if writer is newest else newest.parsed, self._catalog.classes[writer.record], what)

    def _way(self, data: bytes) -> tuple[_Way, int]:
        """How to read the bytes, and where their body starts."""
        if data[:2] == _SINGLE_OBJECT and len(data) >= 10:
            way = self._by_fingerprint.get(bytes(data[2:10]))
            if way is None:
                raise SchemaError(
                    f"cannot decode: schema fingerprint {data[2:10].hex()} is not known here; the writer is newer or "
                    "foreign, update rollstream where this ran",
                    reason="unknown_schema",
                )
            return way, 10
        if data[:1] == _CONFLUENT and len(data) >= 5:
            return self._registered(int.from_bytes(data[1:5], "big")), 5
        raise SchemaError(
            f"cannot decode: the bytes start with {bytes(data[:2]).hex() or 'nothing'}, expected c301 (Avro "
            "single-object) or 00 (Confluent)",
            reason="unknown_framing",
        )

    def _registered(self, schema_id: int) -> _Way:
        if schema_id not in self._by_id:
            if self._registry is None:
                raise SchemaError(
                    f"cannot decode: the bytes name registry schema {schema_id}, and no registry is set; set "
                    "ROLLSTREAM_KAFKA__REGISTRY_URL",
                    reason="unknown_schema",
                )
            schema = self._parse(schema_id, self._registry.schema_text(schema_id))
            self._by_id[schema_id] = self._by_fingerprint.get(schema.fingerprint) or self._way_of(schema)
        return self._by_id[schema_id]

    def _parse(self, schema_id: int, text: str) -> SchemaFile:
        """A registry's schema, as a version of one of our records."""
        with boundary(SchemaError, f"decode: registry schema {schema_id} is no Avro schema", reason="unknown_schema"):
            raw = json.loads(text)
            full_name = fastavro.schema.fullname(raw) if isinstance(raw, dict) and "name" in raw else repr(text[:80])
            for name, cls in self._catalog.classes.items():
                if full_name == f"{NAMESPACE}.{cls.__name__}":
                    return read_schema(name, 0, text)
        raise SchemaError(
            f"cannot decode: registry schema {schema_id} is {full_name}, which is no record of ours; something else "
            "writes into this topic, or rollstream is to be updated where this ran",
            reason="unknown_schema",
        )
