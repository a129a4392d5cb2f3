"""`rollstream dlq`: look at dead letters, and write their originals back. The decisions are in `dead_letters.py`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rollstream.dead_letter_topic import DeadLetterTopic
    from rollstream.dead_letters import Filed, Refused, Selection

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def dlq() -> None:
    """Dead letters: what no stage could use, with its bytes and the reason."""


def _filters(command: F) -> F:
    for option in reversed(
        (
            click.option("--reason", help="Reason code, such as `late`."),
            click.option("--boundary", help="Where it failed: decode, join, group, score, reward, credit, build."),
            click.option("--topic", help="Source topic: a noun such as `calls`, or a full name."),
            click.option("--rollout", help="Rollout id."),
            click.option("--since", help="Filed since: an age (30m, 2h, 1d) or a time (2025-03-01T02:00, UTC)."),
        )
    ):
        command = option(command)
    return command


@dlq.command("list")
@_filters
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Most rows; 0 shows all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, newest last.")
@click.pass_context
def dlq_list(context: click.Context, /, limit: int, as_json: bool, **filters: str | None) -> None:
    """List dead letters, newest last, and count them by reason."""
    from rollstream.dead_letters import as_json as facts
    from rollstream.dead_letters import list_lines

    topic = _topic(context)
    found = topic.find(_selection((), filters), with_values=False)
    if as_json:
        for filed in found[-limit:] if limit else found:
            click.echo(json.dumps(facts(filed)))
    else:
        for line in list_lines(found, limit):
            click.echo(line)
    _tell_unreadable(topic)


@dlq.command("show")
@click.argument("dead_letter_id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def dlq_show(context: click.Context, dead_letter_id: str, as_json: bool) -> None:
    """Show all of one dead letter, and the record in it; the beginning of its id is enough."""
    from rollstream.dead_letters import Selection, opened, show_lines
    from rollstream.schemas.registry import open_codec
    from rollstream.settings import load_settings

    (filed,) = _topic(context).find(Selection(ids=(dead_letter_id,)))
    settings = load_settings(context.obj)
    shown = opened(filed, open_codec(settings.kafka.registry_url, settings.claims))
    click.echo(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else "\n".join(show_lines(shown)))


@dlq.command("redrive")
@click.argument("ids", nargs=-1)
@_filters
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@click.option("--yes", is_flag=True, help="Needed for more than one.")
@click.pass_context
def dlq_redrive(
    context: click.Context, /, ids: tuple[str, ...], dry_run: bool, yes: bool, **filters: str | None
) -> None:
    """Write the originals of dead letters back to their topics and partitions, by id or by filter."""
    selection = _selection(ids, filters)
    if selection.is_all:
        raise click.UsageError("say which dead letters: ids, or a filter such as --reason")
    topic = _topic(context)
    good, refused = topic.sort_out(topic.find(selection))
    if dry_run or not good or (len(good) > 1 and not yes):
        for filed in good:
            click.echo(f"would write {_told(filed)}")
        _tell_refused(refused)
        if good and not dry_run:
            click.echo(f"rollstream: {len(good)} records would be written; say --yes to write them", err=True)
        sys.exit(0 if dry_run and not refused else 2)
    for filed, offset in topic.redrive(good):
        click.echo(f"wrote {_told(filed)} as offset {offset}")
    _tell_refused(refused)
    sys.exit(2 if refused else 0)


def _topic(context: click.Context) -> DeadLetterTopic:
    from rollstream.dead_letter_topic import DeadLetterTopic
    from rollstream.schemas.registry import open_codec
    from rollstream.settings import load_settings

    settings = load_settings(context.obj)
    return DeadLetterTopic(settings.kafka, open_codec(settings.kafka.registry_url, settings.claims))


def _selection(ids: tuple[str, ...], filters: dict[str, str | None]) -> Selection:
    from rollstream.dead_letters import Selection, parse_since

    since = filters.pop("since")
    since_ms = None if since is None else parse_since(since, time.time_ns() // 1_000_000)
    return Selection(**filters, since_ms=since_ms, ids=ids)


def _told(filed: Filed) -> str:
    letter = filed.letter
    return (
        f"{letter.dead_letter_id} ({letter.boundary}: {letter.reason}, {filed.size_bytes} bytes) to {letter.topic} "
        f"partition {letter.partition}"
    )


def _tell_refused(refused: list[Refused]) -> None:
    for one in refused:
        click.echo(f"rollstream: {one.filed.letter.dead_letter_id} cannot go back: {one.why}", err=True)


def _tell_unreadable(topic: DeadLetterTopic) -> None:
    if topic.unreadable:
        click.echo(
            f"rollstream: {topic.unreadable} records of the topic are no dead letters that this version can read",
            err=True,
        )
