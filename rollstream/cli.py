"""The `rollstream` command. Each subcommand imports what it needs when it runs, so that one process's parts never load
another's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollstream import __version__
from rollstream.dlq import dlq
from rollstream.errors import RollstreamError

if TYPE_CHECKING:
    from rollstream.schemas.codec import Codec
    from rollstream.settings import Settings
    from rollstream.sinks.fill import Fill


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rollstream")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML); the environment wins over it.")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """The data layer between agents that act and a trainer that learns from exactly what they sampled."""
    context.obj = config


def _settings(context: click.Context) -> Settings:
    from rollstream.settings import load_settings

    return load_settings(context.obj)


@cli.command()
@click.pass_context
def gateway(context: click.Context) -> None:
    """Serve agents, and record every model call."""
    from rollstream.producers.gateway.serve import serve

    serve(_settings(context))


@cli.command()
@click.pass_context
def processor(context: click.Context) -> None:
    """Run the stages from join to build."""
    from rollstream.processors.shell.run import run

    run(_settings(context))


@cli.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--task-id", required=True, help="Name of the task.")
@click.option("--task", help="What scorers may read of the task: a JSON object.")
@click.option("--group-id", help="Rollouts of one task that are compared; default: a group of its own.")
@click.option("--group-size", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts of the group.")
@click.option("--rollout-id", help="Default: a fresh one.")
@click.option("--attempt", type=click.IntRange(min=0), default=0, show_default=True, help="Attempt of the rollout.")
@click.option("--gateway", "gateway_url", help="Address of its admin routes; default: that of the settings.")
@click.option("--recipe", help="How the command is told where its model is; default: by the name of the program.")
@click.option("--model", help="Model name that it asks for; default: gateway.model_name.")
@click.option("--context-tokens", type=click.IntRange(min=1), help="Context that harnesses compact for.")
@click.option("--check", help="Shell command that decides about success; default: the command's exit code does.")
@click.option("--check-timeout", type=float, default=600, show_default=True, help="Seconds that the check may take.")
@click.option("--timeout", type=float, help="Seconds that the command may take; then the rollout is truncated.")
@click.option(
    "--error-is",
    type=click.Choice(["failed", "aborted"]),
    default="failed",
    show_default=True,
    help="What another exit code than 0 of the command means; an aborted rollout has no reward.",
)
@click.option("--home", type=click.Path(path_type=Path), help="Folder for the harness's settings and state, kept.")
@click.pass_context
def run(context: click.Context, /, command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND as a rollout: claude, codex, pi, openclaw, or any program. Ends with its exit code, or the check's."""
    from rollstream.producers.harnesses.start import start

    sys.exit(start(_settings(context).gateway, command, **options))


@cli.command()
@click.argument("kind", type=click.Choice(["clickhouse", "objects"]))
@click.pass_context
def sink(context: click.Context, kind: str) -> None:
    """Copy every topic into ClickHouse or object storage."""
    from rollstream.sinks.run import run_sink

    run_sink(_settings(context), kind)


@cli.command()
@click.option("--port", type=int, default=9092, show_default=True, help="Port on the loopback address.")
@click.option(
    "--log", type=click.Path(path_type=Path), default=Path("out/broker.log"), show_default=True, help="Its log file."
)
def broker(port: int, log: Path) -> None:
    """Run the embedded Kafka-compatible broker until Ctrl-C; it forgets everything then."""
    import signal

    from rollstream.embedded import EmbeddedBroker, broker_environment

    with EmbeddedBroker(log, port=port) as running:
        click.echo(f"listening on {running.bootstrap}; the other processes need:")
        for name, value in broker_environment(running.bootstrap).items():
            click.echo(f"export {name}='{value}'")
        sys.stdout.flush()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit(0))
        running.process.wait_forever()


@cli.group()
def topics() -> None:
    """Kafka topics."""


@topics.command("list")
@click.pass_context
def topics_list(context: click.Context) -> None:
    """Every topic with its key, partitions, retention and owner; needs no broker."""
    from rollstream.schemas.topics import topics as all_topics

    kafka = _settings(context).kafka
    rows = [("topic", "key", "partitions", "cleanup", "retention", "owner")]
    for topic in all_topics().values():
        days = "for ever" if topic.retention_ms < 0 else f"{topic.retention_ms / 86_400_000:g} days"
        partitions = str(topic.partitions(kafka.partitions))
        rows.append((topic.name(kafka.prefix), topic.key, partitions, topic.cleanup, days, topic.owner))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@topics.command("apply")
@click.pass_context
def topics_apply(context: click.Context) -> None:
    """Create the topics that are missing; a topic that differs is an error, never changed."""
    from rollstream.topic_admin import apply_topics

    for line in apply_topics(_settings(context).kafka):
        click.echo(line)


@cli.group()
def schemas() -> None:
    """Avro schemas."""


@schemas.command("check")
def schemas_check() -> None:
    """Check classes, files, topics, examples and compatibility against each other."""
    from rollstream.schemas.check import check_all
    from rollstream.schemas.codec import schema_files

    problems = check_all()
    for problem in problems:
        click.echo(problem, err=True)
    click.echo(f"{len(schema_files())} schemas, {len(problems)} problems")
    sys.exit(1 if problems else 0)


@schemas.command("write")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
def schemas_write(folder: Path) -> None:
    """Write the schema of each record class that has changed as a new version into FOLDER (the checkout's schemas/avro)."""
    from rollstream.schemas.write import write_changed

    for name in write_changed(folder):
        click.echo(f"wrote {name}")


@schemas.command("register")
@click.pass_context
def schemas_register(context: click.Context) -> None:
    """Register every schema at the registry of the settings."""
    from rollstream.errors import SettingsError
    from rollstream.schemas.codec import schema_files
    from rollstream.schemas.registry import ConfluentRegistry

    url = _settings(context).kafka.registry_url
    if url is None:
        raise SettingsError("cannot register schemas: no registry is set; set ROLLSTREAM_KAFKA__REGISTRY_URL")
    registry = ConfluentRegistry(url)
    for schema in schema_files().values():
        click.echo(f"{schema.record}.v{schema.version}: id {registry.register(schema)}")


@cli.command()
@click.option("--store", help="ClickHouse address; default: sink.clickhouse of the settings.")
@click.option("--closed", is_flag=True, help="Count a call of a rollout or group that is still open as a failure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def audit(context: click.Context, store: str | None, closed: bool, as_json: bool) -> None:
    """Prove from stored data that every call is accounted for and every check holds. Exit code 1 where one does not."""
    from rollstream.schemas.registry import open_codec
    from rollstream.sinks.audit import audit as run_audit
    from rollstream.sinks.connect import connect

    settings = _settings(context)
    client = connect(store or settings.sink.clickhouse, migrate=False)
    report = run_audit(client, closed=closed, codec=open_codec(settings.kafka.registry_url, settings.claims))
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    sys.exit(0 if report.ok else 1)


@cli.command()
@click.argument("query")
@click.option("--store", help="ClickHouse address; default: sink.clickhouse of the settings.")
@click.pass_context
def sql(context: click.Context, query: str, store: str | None) -> None:
    """Ask the stored tables; prints tab-separated rows with a header."""
    from rollstream.errors import SinkError, boundary
    from rollstream.sinks.connect import connect

    client = connect(store or _settings(context).sink.clickhouse, migrate=False)
    with boundary(SinkError, "run the query", reason="bad_query"):
        found = client.query(query.strip().rstrip(";"))
    for row in [found.column_names, *found.result_rows]:
        click.echo("\t".join(str(value) for value in row))


@cli.command()
@click.argument("sample")
@click.option("--store", help="ClickHouse address; default: sink.clickhouse of the settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def explain(context: click.Context, sample: str, store: str | None, as_json: bool) -> None:
    """Follow SAMPLE_ID[:TOKEN] back: token, call, true prefix, rollout, group, score, reward, credit, stage versions."""
    from rollstream.sinks.connect import connect
    from rollstream.sinks.explain import explain as run_explain

    sample_id, _, token = sample.partition(":")
    if token and not token.isdecimal():
        raise click.BadParameter(f"{token!r} is no token position; give SAMPLE_ID or SAMPLE_ID:TOKEN")
    found = run_explain(
        connect(store or _settings(context).sink.clickhouse, migrate=False), sample_id, int(token) if token else None
    )
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else str(found))


@cli.command()
@click.option(
    "--from",
    "start",
    required=True,
    type=click.Choice(["calls", "rollouts", "groups"]),
    help="What is read; everything downstream of it is made again.",
)
@click.option("--to-prefix", help="Write to new topics with this prefix.")
@click.option(
    "--to-store", help="Write to an empty ClickHouse: chdb://FOLDER or http(s)://USER:PASSWORD@HOST:PORT/DB."
)
@click.option(
    "--pipeline", type=click.Path(path_type=Path), help="Pipeline file; default: processor.pipeline of the settings."
)
@click.pass_context
def rebuild(
    context: click.Context, start: str, to_prefix: str | None, to_store: str | None, pipeline: Path | None
) -> None:
    """Make everything downstream of a topic again from the log, beside what is there."""
    from rollstream.processors.pipeline import load_pipeline
    from rollstream.processors.shell.rebuild import NewTopics, Target, take_snapshot
    from rollstream.processors.shell.rebuild import rebuild as run_rebuild
    from rollstream.schemas.registry import open_codec

    if (to_prefix is None) == (to_store is None):
        raise click.UsageError("give one of --to-prefix and --to-store")
    settings = _settings(context)
    prefix = to_prefix or settings.kafka.prefix
    loaded = load_pipeline(pipeline or settings.processor.pipeline)
    snapshot = take_snapshot(settings.kafka, loaded, start)
    for line in snapshot.missing():
        click.echo(f"rollstream: {line}", err=True)
    codec = open_codec(settings.kafka.registry_url, settings.claims)
    target: Target
    if to_store is None:
        target = NewTopics(settings.kafka.model_copy(update={"prefix": prefix, "partitions": snapshot.partitions}))
    else:
        target = _store_to_fill(settings, to_store, codec)
    shown = _Progress(snapshot.records)
    click.echo(str(run_rebuild(settings, loaded, snapshot, target, codec, prefix=prefix, progress=shown)))


def _store_to_fill(settings: Settings, url: str, codec: Codec) -> Fill:
    from confluent_kafka.admin import AdminClient

    from rollstream.kafka import client_properties
    from rollstream.schemas.topics import topics as all_topics
    from rollstream.sinks.fill import Fill
    from rollstream.sinks.run import open_sink, topic_ids

    filled = settings.model_copy(update={"sink": settings.sink.model_copy(update={"clickhouse": url})})
    names = [topic.name(settings.kafka.prefix) for topic in all_topics().values()]
    ids = topic_ids(AdminClient(client_properties(settings.kafka)), names)
    sink = open_sink(filled, "clickhouse", codec)
    return Fill(sink, settings.sink.chunk_records, ids, claimed_bytes=codec.claimed_bytes)


class _Progress:
    """A line on a terminal that is written over; elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told_s = time.monotonic()

    def __call__(self, read: int) -> None:
        is_terminal, now_s = sys.stderr.isatty(), time.monotonic()
        if now_s - self._told_s >= (0.5 if is_terminal else 30.0) or (read == self._total and is_terminal):
            self._told_s = now_s
            end = "\r" if is_terminal and read < self._total else "\n"
            click.echo(f"read {read} of {self._total} records{end}", nl=False, err=True)


cli.add_command(dlq)


def main() -> None:
    """Entry point: our own errors are one line and exit code 2, everything else is a traceback."""
    try:
        cli()
    except RollstreamError as error:
        click.echo(f"rollstream: {error}", err=True)
        sys.exit(2)
