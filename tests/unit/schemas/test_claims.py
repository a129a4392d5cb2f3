"""Records too large for Kafka: what stands there instead, and how the content comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.claims import ClaimStore
from rollstream.errors import BrokerError, SchemaError, SettingsError
from rollstream.schemas.codec import Codec, claim_name
from rollstream.schemas.envelope import draft_message, to_message
from rollstream.schemas.identity import digest_bytes
from rollstream.schemas.records import Record
from rollstream.schemas.records.claims import ClaimCheck
from rollstream.settings import MAX_RECORD_BYTES, ClaimSettings, load_settings
from tests.memory_claims import MemoryClaims
from tests.unit.schemas.calls import a_call

INLINE_BYTES = 1_000
SMALL, LARGE = a_call("c-small"), a_call("c-large", output=range(INLINE_BYTES))


def a_codec(claims: MemoryClaims | ClaimStore) -> Codec:
    return Codec(claims=claims, inline_bytes=INLINE_BYTES)


def reason_of(codec: Codec, value: bytes) -> str:
    with pytest.raises((SchemaError, BrokerError)) as caught:
        codec.decode(value)
    return f"{type(caught.value).__name__} {caught.value.reason}"


def test_large_record_goes_by_claim_and_comes_back_whole() -> None:
    """Kafka holds a small check that names the content by its digest; who decodes gets the record."""
    claims = MemoryClaims()
    whole = Codec().encode(LARGE)

    value = a_codec(claims).encode(LARGE)

    check = ClaimCheck("model_call", digest_bytes(whole), len(whole), "r-1", "c-large")
    assert {claim_name(digest_bytes(whole)): whole} == claims.stored
    assert check == a_codec(claims).decode_frame(value)
    assert LARGE == a_codec(claims).decode(value)
    assert len(value) < INLINE_BYTES < len(whole)


def test_small_record_stays_whole() -> None:
    """Nothing is stored for it, and its bytes are those of a codec without claims."""
    claims = MemoryClaims()

    assert Codec().encode(SMALL) == a_codec(claims).encode(SMALL)
    assert {} == claims.stored


@pytest.mark.parametrize(("spare_bytes", "is_claimed"), [(0, False), (-1, True)])
def test_limit_is_the_size_of_the_framed_record(spare_bytes: int, is_claimed: bool) -> None:
    """What just fits stays; one byte more goes by claim."""
    claims = MemoryClaims()

    Codec(claims=claims, inline_bytes=len(Codec().encode(LARGE)) + spare_bytes).encode(LARGE)

    assert is_claimed == bool(claims.stored)


def test_same_record_gives_the_same_bytes_and_one_claim() -> None:
    """However often and by whomever it is written."""
    claims = MemoryClaims()

    assert a_codec(claims).encode(LARGE) == a_codec(claims).encode(replace(LARGE))
    assert (2, 1) == (claims.puts, len(claims.stored))


def test_claim_that_is_gone_changed_or_a_check_itself_is_a_dead_letter() -> None:
    """Each with its reason; the check in the bytes still tells which rollout and call it was."""
    claims = MemoryClaims()
    codec = a_codec(claims)
    value = codec.encode(LARGE)
    (name,) = claims.stored

    claims.stored[name] = Codec().encode(SMALL)
    changed = reason_of(codec, value)
    del claims.stored[name]
    gone = reason_of(codec, value)
    claims.stored[claim_name(digest_bytes(value))] = value
    nested = reason_of(codec, codec.frame(ClaimCheck("model_call", digest_bytes(value), len(value))))

    assert ["SchemaError claim_mismatch", "SchemaError claim_missing", "SchemaError malformed"] == [
        changed,
        gone,
        nested,
    ]
    check = codec.claim_check(value)
    assert check is not None
    assert ("r-1", "c-large") == (check.rollout_id, check.call_id)
    assert [None, None] == [codec.claim_check(other) for other in (codec.encode(SMALL), b"rubbish")]


def test_store_that_is_down_says_nothing_about_the_record() -> None:
    """It must stop a process, not make dead letters; nor may a codec that was opened without a store."""
    claims = MemoryClaims()
    value = a_codec(claims).encode(LARGE)
    claims.is_down = True

    assert ["BrokerError claims_down"] * 2 == [reason_of(codec, value) for codec in (a_codec(claims), Codec())]
    with pytest.raises(BrokerError):
        a_codec(claims).encode(LARGE)


def test_claim_that_vanishes_between_two_readings_stops_the_process() -> None:
    """A stage that decodes a kept event again cannot say that the event at hand is to blame."""
    claims = MemoryClaims()
    value = a_codec(claims).encode(LARGE)
    before = a_codec(claims).decode_again(value)
    claims.stored.clear()

    with pytest.raises(BrokerError) as caught:
        a_codec(claims).decode_again(value)

    assert (LARGE, "claims_down") == (before, caught.value.reason)


def test_message_of_a_large_record_names_its_claim() -> None:
    """The CloudEvents attribute `dataref` is there with the claim's name, and only then; the type stays the record's."""
    claims = MemoryClaims()
    codec = a_codec(claims)

    def message_of(record: Record):  # type: ignore[no-untyped-def]
        return to_message(record, codec, prefix="rollstream", source="/gateway")

    large, small = message_of(LARGE), message_of(SMALL)

    (name,) = claims.stored
    headers = dict(large.headers)
    assert (name.encode(), b"rollstream.model_call") == (headers["ce_dataref"], headers["ce_type"])
    assert (b"g-1", None) == (large.key, large.claim)
    assert "ce_dataref" not in dict(small.headers)


def test_drafted_message_stores_nothing() -> None:
    """An event loop stores the claim itself, before it sends."""
    claims = MemoryClaims()

    message = draft_message(LARGE, a_codec(claims), prefix="rollstream", source="/gateway")

    assert {} == claims.stored
    assert message.claim is not None
    assert Codec().encode(LARGE) == message.claim.data


def test_folder_keeps_claims_and_heals_a_changed_one(tmp_path: Path) -> None:
    """Writing a record again puts the right content back, in a file of the claim's name."""
    codec = a_codec(ClaimStore(ClaimSettings(store=str(tmp_path / "claims"))))
    value = codec.encode(LARGE)
    file = tmp_path / "claims" / claim_name(digest_bytes(Codec().encode(LARGE)))
    file.write_bytes(b"changed")
    changed = reason_of(codec, value)

    again = codec.encode(LARGE)

    assert "SchemaError claim_mismatch" == changed
    assert value == again
    assert LARGE == codec.decode(value)


async def test_folder_is_written_from_an_event_loop(tmp_path: Path) -> None:
    """Without blocking it."""
    codec = a_codec(ClaimStore(ClaimSettings(store=str(tmp_path))))
    value, claim = codec.pack(LARGE)
    assert claim is not None

    await codec.store_async(claim)

    assert LARGE == codec.decode(value)


async def test_claim_that_was_read_ahead_is_decoded_without_the_store(tmp_path: Path) -> None:
    """Now, and again when a stage asks for the record once more."""
    writer = a_codec(ClaimStore(ClaimSettings(store=str(tmp_path))))
    value, small = writer.encode(LARGE), writer.encode(SMALL)
    codec = a_codec(ClaimStore(ClaimSettings(store=str(tmp_path))))

    await codec.read_ahead(value)
    await codec.read_ahead(small)
    (tmp_path / claim_name(digest_bytes(Codec().encode(LARGE)))).unlink()

    assert (True, False, False) == (codec.is_claim(value), codec.is_claim(small), codec.is_claim(b"\xc3\x01rubbish"))
    assert [LARGE, LARGE] == [codec.decode(value), codec.decode_again(value)]


async def test_claims_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest stay, and one in any case."""
    claims = MemoryClaims()
    codec = a_codec(claims)
    values = [codec.encode(a_call(f"c-{n}", output=range(INLINE_BYTES))) for n in range(3)]
    size = len(next(iter(claims.stored.values())))
    monkeypatch.setattr("rollstream.schemas.codec.AT_HAND_BYTES", 2 * size)

    kept = []
    for value in (*values, values[2]):
        await codec.read_ahead(value)
        kept.append(len(codec._at_hand))

    assert [1, 2, 2, 2] == kept
    assert 2 * size == codec._at_hand_bytes


async def test_what_is_wrong_with_a_claim_is_found_by_decoding_until_it_is_restored() -> None:
    """Reading ahead keeps nothing that is not what was written, and leaves a missing claim to `decode`."""
    claims = MemoryClaims()
    codec = a_codec(claims)
    value = codec.encode(LARGE)
    (name,) = claims.stored
    whole = claims.stored[name]
    found = []

    for content in (None, b"changed", whole):
        claims.stored = {} if content is None else {name: content}
        await codec.read_ahead(value)
        found.append("whole" if content == whole and codec.decode(value) == LARGE else reason_of(codec, value))

    assert ["SchemaError claim_missing", "SchemaError claim_mismatch", "whole"] == found


async def test_reading_ahead_from_a_store_that_is_away_says_so(tmp_path: Path) -> None:
    """It is no missing claim."""
    value = a_codec(MemoryClaims()).encode(LARGE)

    with pytest.raises(BrokerError) as caught:
        await a_codec(ClaimStore(ClaimSettings(store=str(tmp_path / "nowhere")))).read_ahead(value)

    assert "claims_down" == caught.value.reason


def test_missing_file_is_a_missing_claim_and_a_missing_folder_a_store_that_is_down(tmp_path: Path) -> None:
    """A process that looks in the wrong place must not make dead letters of what is elsewhere, nor the folder."""
    value = a_codec(MemoryClaims()).encode(LARGE)

    empty = a_codec(ClaimStore(ClaimSettings(store=str(tmp_path))))
    nowhere = a_codec(ClaimStore(ClaimSettings(store=str(tmp_path / "nowhere"))))

    assert ["SchemaError claim_missing", "BrokerError claims_down"] == [
        reason_of(empty, value),
        reason_of(nowhere, value),
    ]
    assert not (tmp_path / "nowhere").exists()


def test_bucket_that_does_not_answer_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 1."""
    monkeypatch.setattr("rollstream.claims._RETRY_S", 0.1)
    options = {"endpoint": "http://127.0.0.1:1", "region": "r", "access_key_id": "a", "secret_access_key": "b"}
    codec = a_codec(ClaimStore(ClaimSettings(store="s3://claims/here", s3=options)))
    value = a_codec(MemoryClaims()).encode(LARGE)

    with pytest.raises(BrokerError) as put:
        codec.encode(LARGE)

    assert ("claims_down", "BrokerError claims_down") == (put.value.reason, reason_of(codec, value))


@pytest.mark.parametrize(
    "values",
    [
        {"CLAIMS__STORE": "gs://bucket/prefix"},
        {"CLAIMS__STORE": "s3://"},
        {"CLAIMS__INLINE_BYTES": str(MAX_RECORD_BYTES)},
        {"CLAIMS__INLINE_BYTES": "0"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(values: dict[str, str]) -> None:
    """An address that is neither folder nor bucket, and a limit at which Kafka would refuse what stays whole."""
    with pytest.raises(SettingsError, match=r"claims\."):
        load_settings(environ={f"ROLLSTREAM_{name}": value for name, value in values.items()})


def test_option_that_the_store_does_not_know_is_refused() -> None:
    """At the start, not at the first large record."""
    with pytest.raises(SettingsError, match="endpont"):
        ClaimStore(ClaimSettings(store="s3://claims", s3={"endpont": "http://127.0.0.1:1"}))
