"""A Confluent-compatible schema registry, behind the two calls the codec needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollstream.claims import ClaimStore
from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.schemas.codec import Codec, SchemaFile
from rollstream.settings import ClaimSettings

_NOT_FOUND = 404
_ANSWER_S = 5  # the client's own default is for ever


def open_codec(url: str | None, claims: ClaimSettings | None) -> Codec:
    """The codec of a deployment.

    Args:
        url: `kafka.registry_url` of the settings; None where there is no registry.
        claims: `claims` of the settings; None where no record is ever large (policies).
    """
    registry = None if url is None else ConfluentRegistry(url)
    if claims is None:
        return Codec(registry)
    return Codec(registry, ClaimStore(claims), inline_bytes=claims.inline_bytes)


class ConfluentRegistry:
    """Any registry that speaks Confluent's API. Subjects are named after the record (`rollstream.ModelCall`)."""

    def __init__(self, url: str) -> None:
        """Args: url: for instance `http://registry:8081`, or `mock://name` for one in this process."""
        with boundary(SchemaError, "load the registry client; install rollstream[registry]", reason="no_registry"):
            from confluent_kafka.schema_registry import SchemaRegistryClient

        self._client = SchemaRegistryClient.new_client({"url": url, "timeout": _ANSWER_S, "max.retries": 1})
        self._url = url

    def schema_id(self, schema: SchemaFile) -> int:
        """The id of a registered schema; does not register it.

        Raises: SchemaError: reason `not_registered`. BrokerError: reason `registry_down`.
        """
        what = f"find {_subject(schema)} at registry {self._url}"
        with _answering(what, "not_registered", "run `rollstream schemas register`"):
            found = self._client.lookup_schema(_subject(schema), _schema(schema)).schema_id
            if found is None:
                raise LookupError("the registry answered without an id")
            return int(found)

    def schema_text(self, schema_id: int) -> str:
        """The schema behind an id.

        Raises: SchemaError: the registry has none. BrokerError: reason `registry_down`: it does not say, so nothing is known
            about the bytes, and they must not be taken for unreadable.
        """
        what = f"get schema {schema_id} from registry {self._url}"
        with _answering(what, "unknown_schema", "see whether kafka.registry_url is the writer's registry"):
            return str(self._client.get_schema(schema_id).schema_str)

    def register(self, schema: SchemaFile) -> int:
        """Register a schema. Returns: its id."""
        with boundary(SchemaError, f"register {_subject(schema)} at {self._url}", reason="not_registered"):
            return int(self._client.register_schema(_subject(schema), _schema(schema)))


@contextmanager
def _answering(what: str, reason: str, advice: str) -> Iterator[None]:
    """Tell a registry that says no (SchemaError) from one that says nothing (BrokerError)."""
    from confluent_kafka.schema_registry import SchemaRegistryError

    with boundary(BrokerError, what, reason="registry_down"):
        try:
            yield
        except SchemaRegistryError as cause:
            if cause.http_status_code != _NOT_FOUND:
                raise
            raise SchemaError(f"cannot {what}: {cause}; {advice}", reason=reason) from cause


def _subject(schema: SchemaFile) -> str:
    return f"rollstream.{schema.parsed['name'].rpartition('.')[2]}"


def _schema(schema: SchemaFile):  # type: ignore[no-untyped-def]
    from confluent_kafka.schema_registry import Schema

    return Schema(schema.text, "AVRO")
