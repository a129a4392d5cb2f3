"""A Confluent-compatible schema registry, behind the two calls the codec needs."""

from __future__ import annotations

from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.schemas.codec import Codec, SchemaFile

_NOT_FOUND = 404


def open_codec(url: str | None) -> Codec:
    """The codec of a deployment. Args: url: `kafka.registry_url` of the settings; None where there is no registry."""
    return Codec(None if url is None else ConfluentRegistry(url))


class ConfluentRegistry:
    """Any registry that speaks Confluent's API. Subjects are named after the record (`rollstream.ModelCall`)."""

    def __init__(self, url: str) -> None:
        """Args: url: for instance `http://registry:8081`, or `mock://name` for one in this process."""
        with boundary(SchemaError, "load the registry client; install rollstream[registry]", reason="no_registry"):
            from confluent_kafka.schema_registry import SchemaRegistryClient

        self._client = SchemaRegistryClient.new_client({"url": url})
        self._url = url

    def schema_id(self, schema: SchemaFile) -> int:
        """The id of a registered schema; does not register it."""
        with boundary(
            SchemaError,
            f"find {_subject(schema)} at registry {self._url}; run `rollstream schemas register`",
            reason="not_registered",
        ):
            found = self._client.lookup_schema(_subject(schema), _schema(schema)).schema_id
            if found is None:
                raise LookupError("the registry answered without an id")
            return found

    def schema_text(self, schema_id: int) -> str:
        """The schema behind an id.

        Raises: SchemaError: the registry has none. BrokerError: reason `registry_down`: it does not say, so nothing is known
            about the bytes, and they must not be taken for unreadable.
        """
        from confluent_kafka.schema_registry import SchemaRegistryError

        what = f"get schema {schema_id} from registry {self._url}"
        with boundary(BrokerError, what, reason="registry_down"):
            try:
                return str(self._client.get_schema(schema_id).schema_str)
            except SchemaRegistryError as cause:
                if cause.http_status_code != _NOT_FOUND:
                    raise
                raise SchemaError(f"cannot {what}: {cause}", reason="unknown_schema") from cause

    def register(self, schema: SchemaFile) -> int:
        """Register a schema. Returns: its id."""
        with boundary(SchemaError, f"register {_subject(schema)} at {self._url}", reason="not_registered"):
            return int(self._client.register_schema(_subject(schema), _schema(schema)))


def _subject(schema: SchemaFile) -> str:
    return f"rollstream.{schema.parsed['name'].rpartition('.')[2]}"


def _schema(schema: SchemaFile):  # type: ignore[no-untyped-def]
    from confluent_kafka.schema_registry import Schema

    return Schema(schema.text, "AVRO")
