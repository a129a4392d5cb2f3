"""A Confluent-compatible registry over HTTP: register, look up, read and write through it, and do without it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from rollstream.cli import cli
from rollstream.errors import BrokerError, SchemaError
from rollstream.process import free_port
from rollstream.producers.gateway.app import Gateway
from rollstream.producers.kafka import KafkaPublisher
from rollstream.schemas.codec import Codec, schema_files
from rollstream.schemas.records import RolloutStatus, Terminal
from rollstream.schemas.registry import ConfluentRegistry, open_codec
from rollstream.settings import GatewaySettings, KafkaSettings
from tests.services.registry import SchemaRegistry
from tests.unit.producers.fakes import FakeEngine
from tests.unit.schemas.next_versions import adds_a_field, body_of, examples, next_schema

pytestmark = pytest.mark.timeout(600)
TERMINAL = Terminal("r-1", 0, "g-1", 8, "flight-desk", RolloutStatus.SUCCEEDED, 1_000)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    """A registry at which `rollstream schemas register` was run."""
    with SchemaRegistry(tmp_path_factory.mktemp("registry")) as registry:
        done = CliRunner().invoke(
            cli, ["schemas", "register"], env={"ROLLSTREAM_KAFKA__REGISTRY_URL": registry.url}, catch_exceptions=False
        )
        assert [f"{schema.label}: id" for schema in schema_files().values()] == [
            line.rpartition(" ")[0] for line in done.output.splitlines()
        ]
        yield registry


def framed(schema_id: int, body: bytes) -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big") + body


def test_every_record_goes_through_the_registry(registry: SchemaRegistry) -> None:
    """What one process writes with its ids another one reads, which has to ask for each of them."""
    writer, reader = open_codec(registry.url, None), open_codec(registry.url, None)

    for record in examples().values():
        value = writer.encode(record)

        assert b"\x00" == value[:1]
        assert record == reader.decode(value)


def test_registering_again_changes_no_id(registry: SchemaRegistry) -> None:
    """Every process that starts may do it."""
    client = ConfluentRegistry(registry.url)

    for schema in schema_files().values():
        assert client.schema_id(schema) == client.register(schema)


def test_newer_schema_that_only_the_registry_knows_is_read(registry: SchemaRegistry) -> None:
    """An old reader gets it from there, and passes over what it does not know."""
    schema = next_schema("terminal", adds_a_field)
    schema_id = registry.register("rollstream.Terminal", schema.text)

    read = open_codec(registry.url, None).decode(framed(schema_id, body_of(TERMINAL, schema)))

    assert TERMINAL == read


def test_wrong_ids_are_dead_letters(registry: SchemaRegistry) -> None:
    """An id that the registry does not know, and one of somebody else's schema."""
    foreign = registry.register(
        "shop.Order", '{"type": "record", "name": "Order", "namespace": "shop", "fields": []}'
    )

    for schema_id in (foreign, 999_999):
        with pytest.raises(SchemaError) as caught:
            open_codec(registry.url, None).decode(framed(schema_id, b""))

        assert "unknown_schema" == caught.value.reason


def test_record_whose_schema_nobody_registered_says_what_to_run(registry: SchemaRegistry) -> None:
    """A version of our own that the registry does not have."""
    with pytest.raises(SchemaError, match="rollstream schemas register") as caught:
        ConfluentRegistry(registry.url).schema_id(next_schema("group", adds_a_field))

    assert "not_registered" == caught.value.reason


def test_registry_that_is_away_stops_only_what_was_never_asked(tmp_path: Path, registry: SchemaRegistry) -> None:
    """Ids that are known go on; another one is a broker's error, not a dead letter; and it is asked again later."""
    codec = open_codec(registry.url, None)
    value = codec.encode(TERMINAL)
    codec.decode(value)
    other = next(record for name, record in examples().items() if name == "group")
    unasked = open_codec(registry.url, None).encode(other)

    registry.pause()
    try:
        written, read = codec.encode(TERMINAL), codec.decode(value)
        with pytest.raises(BrokerError) as writing:
            codec.encode(other)
        with pytest.raises(BrokerError) as reading:
            codec.decode(unasked)
    finally:
        registry.resume()

    assert (value, TERMINAL) == (written, read)
    assert ["registry_down"] * 2 == [writing.value.reason, reading.value.reason]
    assert (unasked, other) == (codec.encode(other), codec.decode(unasked))


async def test_registry_that_hangs_does_not_keep_the_gateway_from_answering(tmp_path: Path) -> None:
    """It takes the connection and says nothing. Rollouts wait for it and are refused for now; probes are answered at once."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        kafka = KafkaSettings(bootstrap="127.0.0.1:1", registry_url=url, properties={"log_level": "0"})
        settings = GatewaySettings(key_secret="s", spool_dir=tmp_path / "spool", ack_timeout_s=1.0)
        gateway = Gateway(settings, FakeEngine(), lambda: KafkaPublisher(kafka))
        await gateway.start()
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            opening = asyncio.create_task(http.post("/rollouts", json={"task_id": "t"}))
            healths = []
            while not opening.done():
                began_s = time.monotonic()
                healths.append(((await http.get("/health")).status_code, time.monotonic() - began_s))
                await asyncio.wait([opening], timeout=0.05)
        hanging.close()
        await gateway.stop()

    assert (503, "ack_timeout") == (opening.result().status_code, opening.result().json()["error"]["code"])
    assert len(healths) > 5
    assert {200} == {status for status, _ in healths}
    assert max(took_s for _, took_s in healths) < 0.5


def test_registry_that_is_away_at_the_start_is_no_dead_letter() -> None:
    """A process that starts before its registry neither writes nor drops anything."""
    codec = open_codec(f"http://127.0.0.1:{free_port()}", None)

    with pytest.raises(BrokerError) as writing:
        codec.encode(TERMINAL)
    with pytest.raises(BrokerError) as reading:
        codec.decode(framed(1, b""))

    assert ["registry_down"] * 2 == [writing.value.reason, reading.value.reason]
    assert TERMINAL == codec.decode(Codec().encode(TERMINAL))
