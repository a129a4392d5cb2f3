"""The codec: two framings, strict about what it reads."""

from __future__ import annotations

import dataclasses
import math

import pytest
from fastavro.schema import fingerprint

from rollstream.errors import BrokerError, SchemaError
from rollstream.schemas.codec import Codec, encode_body, newest_schema, schema_files, with_digest
from rollstream.schemas.records import RolloutStatus, StageRef, Terminal
from rollstream.schemas.records.rollouts import Group, GroupClose
from rollstream.schemas.registry import ConfluentRegistry
from rollstream.schemas.types import pack_floats, pack_ids, pack_mask, unpack_floats, unpack_ids

TERMINAL = Terminal("r-1", 0, "g-1", 8, "flight-desk", RolloutStatus.SUCCEEDED, 1_000)


def test_fingerprint_is_the_specification_s_crc_64() -> None:
    """The fingerprint of "int" is the value that the Avro specification's algorithm gives, little endian."""
    expected = (0x7275D51A3F395C8F).to_bytes(8, "little")

    assert bytes.fromhex(fingerprint('"int"', "CRC-64-AVRO")) == expected


def test_single_object_encoding_round_trips() -> None:
    """What is encoded without a registry starts with C3 01 and decodes to an equal record."""
    data = Codec().encode(TERMINAL)

    assert data[:2] == b"\xc3\x01"
    assert Codec().decode(data) == TERMINAL


def test_registry_framing_round_trips_and_is_read_beside_the_other() -> None:
    """With a registry the frame is Confluent's, and the same codec still reads single-object encoding."""
    registry = ConfluentRegistry("mock://codec-test")
    for schema in schema_files().values():
        registry.register(schema)
    codec = Codec(registry)

    data = codec.encode(TERMINAL)

    assert data[:1] == b"\x00"
    assert codec.decode(data) == TERMINAL
    assert codec.decode(Codec().encode(TERMINAL)) == TERMINAL


def test_registry_that_does_not_answer_says_nothing_about_the_bytes() -> None:
    """While it is away records must not become dead letters; one that it does not know may."""
    away, there = ConfluentRegistry("mock://codec-away"), ConfluentRegistry("mock://codec-unknown")
    away._client = _Away()
    data = b"\x00\x00\x00\x00\x07" + Codec().encode(TERMINAL)[10:]

    with pytest.raises(BrokerError) as unanswered:
        Codec(away).decode(data)
    with pytest.raises(SchemaError) as unknown:
        Codec(there).decode(data)

    assert ("registry_down", "unknown_schema") == (unanswered.value.reason, unknown.value.reason)


class _Away:
    """A registry's client without a network."""

    def get_schema(self, schema_id: int) -> None:
        raise ConnectionError("no route")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda b: b"", "unknown_framing"),
        (lambda b: b"{json}", "unknown_framing"),
        (lambda b: b[:2] + bytes(8) + b[10:], "unknown_schema"),
        (lambda b: b"\x00\x00\x00\x00\x07" + b[10:], "unknown_schema"),
        (lambda b: b[:-3], "malformed"),
        (lambda b: b[:10], "malformed"),
        (lambda b: b + b"x", "malformed"),
    ],
)
def test_damaged_bytes_are_refused_with_their_reason(damage, reason: str) -> None:
    """Foreign, unknown, cut and padded bytes are each refused with a reason code."""
    data = damage(Codec().encode(TERMINAL))

    with pytest.raises(SchemaError) as caught:
        Codec().decode(data)

    assert caught.value.reason == reason


def test_a_record_cut_anywhere_is_refused() -> None:
    """No proper prefix of a record decodes."""
    data = Codec().encode(TERMINAL)

    for length in range(len(data)):
        with pytest.raises(SchemaError):
            Codec().decode(data[:length])


def test_a_value_of_the_wrong_type_is_refused_when_encoding() -> None:
    """A field that does not fit its schema is named, not coerced."""
    wrong = dataclasses.replace(TERMINAL, group_size="eight")  # type: ignore[arg-type]

    with pytest.raises(SchemaError, match="group_size"):
        Codec().encode(wrong)


def test_digest_covers_everything_but_itself() -> None:
    """Changing any field changes the digest; setting it twice does not."""
    stage = StageRef("group", "group", 1, "c")
    group = Group("g", 0, 1, "t", GroupClose.FULL, (), (), 5, "", stage, "p", "d")

    once = with_digest(group)

    assert with_digest(once) == once
    assert with_digest(dataclasses.replace(group, closed_at_ms=6)).digest != once.digest


def test_packed_arrays_round_trip_and_keep_nan() -> None:
    """Ids keep 32 bits; a missing log-probability stays NaN."""
    ids = [0, 1, 0xFFFFFFFF]

    assert unpack_ids(pack_ids(ids)).tolist() == ids
    floats = unpack_floats(pack_floats([-0.5, math.nan])).tolist()
    assert floats[0] == -0.5
    assert math.isnan(floats[1])


@pytest.mark.parametrize(
    "pack", [lambda: pack_ids([-1]), lambda: pack_ids([1.5]), lambda: pack_ids([1 << 32]), lambda: pack_mask([2])]
)
def test_values_that_do_not_fit_are_not_packed(pack) -> None:
    """Negative, fractional and too large ids and masks other than 0 and 1 are refused."""
    with pytest.raises(SchemaError):
        pack()


def test_an_array_cut_within_an_item_is_refused() -> None:
    """Bytes that are no whole number of items are no array."""
    with pytest.raises(SchemaError, match="multiple of 4"):
        unpack_ids(b"\x00\x01\x02")


def test_body_has_no_frame() -> None:
    """Digests are over the body alone, so they do not depend on the registry."""
    assert Codec().encode(TERMINAL)[10:] == encode_body(TERMINAL)
    assert newest_schema("terminal").fingerprint == Codec().encode(TERMINAL)[2:10]
