"""Every setting of every process, in one place.

A setting comes from the environment (`ROLLSTREAM_KAFKA__BOOTSTRAP`) or from a YAML file (`kafka: {bootstrap: ...}`), the
environment winning. The defaults run on one machine. An unknown name is an error that tells the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollstream.errors import SettingsError

PREFIX = "ROLLSTREAM_"

MAX_RECORD_BYTES = 8_000_000
"""Largest record of any topic, the same for producers and topics: a prompt of 200,000 tokens is 0.8 MB, a rollout holds many."""
MAX_VALUE_BYTES = MAX_RECORD_BYTES - 64 * 1024
"""Largest value in any topic: leaves room for key, headers and batch. Larger records go by claim, see `ClaimSettings`."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class KafkaSettings(_Part):
    """The broker and the topics."""

    bootstrap: str = "localhost:9092"
    """Bootstrap servers, comma separated."""
    prefix: str = "rollstream"
    """First part of every topic name."""
    partitions: int = Field(6, ge=1)
    """Partitions of each topic keyed by group. Never changed in place: it decides where a group lives."""
    replication: int = Field(1, ge=1)
    """Copies of each partition; 3 in production."""
    registry_url: str | None = None
    """Confluent-compatible schema registry; None writes Avro single-object encoding."""
    session_timeout_ms: int = Field(10_000, ge=1_000)
    """After this long without a heartbeat a consumer's partitions go to another."""
    properties: dict[str, str] = Field(default_factory=dict)
    """Further librdkafka properties, for instance `security.protocol`. Processors know those of security, `enable.idempotence`,
    `linger.ms` (how long a record waits for company) and `fetch.min.bytes` (how much a reader waits for, a moment at most): the
    last two spare brokers and clients work, and every stage waits so much longer."""


class ClaimSettings(_Part):
    """Where the content of records goes that are too large for Kafka. The same for every process of a deployment."""

    store: str = Field("out/claims", pattern=r"^(s3://[^/]+(/.*)?|[^:]+)$")
    """A folder, if all processes share its disk, or `s3://bucket/prefix`."""
    inline_bytes: int = Field(4 * 1024 * 1024, ge=1024, le=MAX_VALUE_BYTES - 64 * 1024)
    """A record whose bytes are more than this goes into the store."""
    s3: dict[str, str] = Field(default_factory=dict)
    """Options of the S3 store, as obstore names them: `endpoint`, `region`, `access_key_id`, ..."""


class GatewaySettings(_Part):
    """The gateway process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8600, ge=0)
    """Port to listen on; 0 takes a free one and prints it."""
    public_url: str | None = None
    """The address that rollouts are told; None tells the one that the request came to."""
    key_secret: str | None = None
    """Secret that rollout keys are signed with, the same in every replica; None makes one, good until a restart."""
    key_ttl_s: int = Field(86_400, ge=1)
    """How long a rollout's key is good for."""
    admin_key: str | None = None
    """Bearer key for opening rollouts and publishing policies; None leaves both open to whoever reaches the port."""
    admin_host: str = "127.0.0.1"
    """Address of the admin port."""
    admin_port: int | None = Field(None, ge=0)
    """Port for opening rollouts and publishing policies, away from agents; 0 takes a free one. None: the public port has them."""
    max_request_bytes: int = Field(32 * 1024 * 1024, ge=1)
    """Largest request; more is a 413."""
    max_calls: int = Field(1024, ge=1)
    """Most calls at once; more get a 429."""
    max_backlog: int = Field(10_000, ge=1)
    """Most records that may wait for Kafka; while there are more, calls get a 503."""
    engine: Literal["vllm", "sglang", "local"] = "vllm"
    """Which engine serves the calls."""
    engine_url: str = "http://127.0.0.1:8000"
    """The inference server's address."""
    engine_admin_url: str | None = None
    """The server's address for weight updates (vLLM's development routes); None leaves the weights alone."""
    engine_pause_mode: Literal["abort", "wait", "keep"] = "wait"
    """What a weight update does to running calls: ends them, waits for them, or has them go on with the next weights."""
    engine_weights: Literal["full", "adapter"] = "full"
    """What a policy version is: all weights, or a LoRA adapter under a name of its own (engine `vllm`)."""
    model_path: str | None = None
    """Folder of the model (engine `local`)."""
    model_name: str = "policy"
    """Model name the engine serves."""
    policy: str = "default"
    """Name of the policy that the model is."""
    tool_parser: Literal["hermes", "none"] = "hermes"
    """How tool calls are written in the model's text (engines without parsers of their own: `sglang`, `local`)."""
    max_context_tokens: int = Field(2048, ge=1)
    """Most prompt and output tokens of a call (engine `local`)."""
    max_output_tokens: int = Field(512, ge=1)
    """Most output tokens where the client names no limit."""
    temperature: float = Field(1.0, ge=0)
    """Temperature where the client names none."""
    engine_timeout_s: float = Field(300.0, gt=0)
    """How long one engine request may take."""
    ack_timeout_s: float = Field(10.0, gt=0)
    """How long Kafka may take to acknowledge a record before the client gets a retryable error."""
    spool_dir: Path = Path("out/spool")
    """Where an outcome is kept when Kafka did not acknowledge it in time; written to Kafka at the next start."""


class ProcessorSettings(_Part):
    """The stream processors."""

    pipeline: Path = Path("pipelines/default.yaml")
    """The pipeline file."""
    stages: tuple[str, ...] = ("join", "group", "score", "reward", "credit", "build")
    """Which stages this process runs."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Static group membership: a restart within the session timeout keeps its partitions."""
    dead_letter_limit: float = Field(0.2, ge=0, le=1)
    """Stop when more than this part of the last thousand records became dead letters: the deploy is bad, not the data."""
    metrics_port: int = Field(0, ge=0)
    """Prometheus port; 0 serves none."""


class SinkSettings(_Part):
    """The sinks."""

    clickhouse: str = "chdb://out/clickhouse"
    """`chdb://FOLDER` for the embedded engine, or `http(s)://user:password@host:port/database`."""
    objects: str = "out/objects"
    """A folder, or `s3://bucket/prefix`."""
    s3: dict[str, str] = Field(default_factory=dict)
    """Options of the S3 store, as obstore names them: `endpoint`, `region`, `access_key_id`, ..."""
    chunk_records: int = Field(2_000, ge=1)
    """A chunk holds the records of this many consecutive offsets."""
    max_age_s: float = Field(2.0, gt=0)
    """A chunk that is not full is written after this long (ClickHouse)."""
    objects_max_age_s: float = Field(30.0, gt=0)
    """The same for object storage, where every write makes files."""
    metrics_port: int = Field(0, ge=0)
    """Prometheus port; 0 serves none."""


class Settings(_Part):
    """All settings."""

    kafka: KafkaSettings = KafkaSettings()
    """Broker and topics."""
    claims: ClaimSettings = ClaimSettings()
    """Content of large records."""
    gateway: GatewaySettings = GatewaySettings()
    """Gateway process."""
    processor: ProcessorSettings = ProcessorSettings()
    """Processor process."""
    sink: SinkSettings = SinkSettings()
    """Sink processes."""


def load_settings(file: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from a file and the environment.

    Raises: SettingsError: an unknown name, a value of the wrong type, or a file that cannot be read.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text("utf-8")) or {}
        except (OSError, yaml.YAMLError) as cause:
            raise SettingsError(f"cannot read settings file {str(file)!r}: {cause}") from cause
        if not isinstance(values, dict):
            raise SettingsError(f"cannot read settings file {str(file)!r}: expected a mapping, got {values!r}")
    for name, text in (os.environ if environ is None else environ).items():
        if name.startswith(PREFIX):
            part, _, field = name[len(PREFIX) :].lower().partition("__")
            value = _value(name, text)
            outer = values.get(part) or {}
            if field and not isinstance(outer, dict):
                raise SettingsError(f"setting {part}: expected a mapping, got {outer!r}")
            values[part] = {**outer, field: value} if field else value
    try:
        return Settings(**values)
    except ValidationError as cause:
        raise SettingsError("; ".join(_problem(error) for error in cause.errors())) from None


def setting_names() -> Iterator[str]:
    """Every setting as an environment variable."""
    for part, info in Settings.model_fields.items():
        for field in info.annotation.model_fields:  # type: ignore[union-attr]
            yield f"{PREFIX}{part}__{field}".upper()


def _value(name: str, text: str) -> Any:
    """Lists and mappings are given as JSON or YAML in flow style; all else stays text for pydantic to read."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as cause:
        raise SettingsError(f"cannot read {name}={text!r} as a list or mapping: {cause}") from cause


def _problem(error: Any) -> str:
    where = ".".join(str(at) for at in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"setting {where}: {error['msg']}, got {error['input']!r}"
    known = [name[len(PREFIX) :].lower().replace("__", ".") for name in setting_names()] + list(Settings.model_fields)
    near = difflib.get_close_matches(where, known, 1)
    return f"unknown setting {where!r}" + (f", nearest is {near[0]!r}" if near else f", expected one of {known}")
