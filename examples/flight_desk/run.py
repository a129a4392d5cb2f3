"""`make demo`: a tiny model learns the flight desk from samples that went through Kafka, Faust and ClickHouse.

Teaches the model the form of a tool call, starts every process of rollstream with embedded parts, lets the agents play and the
trainer learn, shows how success rises, then stops it all, audits what was stored and explains one token of it.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click
from confluent_kafka import Consumer, KafkaError, TopicPartition
from rich.console import Console
from rich.live import Live

from . import recipe
from .parts import Parts, Tail
from .report import Report, draw, live_table, write_report

_HERE = Path(__file__).parent
_MARK = "logs/kafka.log"
"""The first file that a demo makes."""


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Folder; what an earlier demo left there goes first.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides teaching, desks and training order.")
@click.option("--steps", type=click.IntRange(min=1), default=recipe.STEPS, show_default=True, help="Optimizer steps.")
@click.option("--shuffle-rewards", is_flag=True, help="Control run: rewards are shuffled, so nothing can be learned.")
def main(out: Path, seed: int, steps: int, shuffle_rewards: bool) -> None:
    """Run the demo. Exit code 1 if success did not rise (or rose in a control run) or the audit found a fault."""
    console = Console()
    out = out.absolute()
    empty(out)
    began_s = time.monotonic()
    with Parts(out, out / "model", _HERE / "pipeline.yaml") as parts:
        console.print(f"Starting broker, processors and sinks; logs in {out / 'logs'}")
        parts.start_stream()
        console.print("Teaching the tiny model the form of a tool call")
        _teach(parts, seed)
        parts.start_gateway()
        taught_s = time.monotonic()
        _learn(parts, console, seed, steps, shuffle_rewards)
        learned_s = time.monotonic()
        console.print("Waiting for the sinks to write everything")
        _drain(parts)
    report = Report.of(
        out,
        parts.clickhouse,
        seed=seed,
        shuffled=shuffle_rewards,
        seconds={"start": taught_s - began_s, "learn": learned_s - taught_s, "total": time.monotonic() - began_s},
    )
    write_report(report, out / "report.json")
    draw(report, out / "success.png")
    report.show(console, out)
    raise SystemExit(0 if report.is_good else 1)


def empty(out: Path) -> None:
    """Make the demo's folder, without what an earlier demo left in it.

    Raises: click.UsageError: it holds something else, which is not ours to delete.
    """
    is_ours = (out / _MARK).is_file()
    if out.exists() and not is_ours and (not out.is_dir() or any(out.iterdir())):
        raise click.UsageError(f"--out {out} is no folder of this demo; give an empty or a new one")
    if out.exists():
        shutil.rmtree(out)
    (out / "logs").mkdir(parents=True)
    (out / _MARK).touch()


def _teach(parts: Parts, seed: int) -> None:
    process = parts.start(
        "teach", ["-m", "examples.flight_desk.teach", "--out", str(parts.model), "--seed", str(seed)]
    )
    if process.wait_exit(300) != 0:
        raise SystemExit(f"teaching failed; log {process.log_file}:\n{process.log_tail()}")


def _learn(parts: Parts, console: Console, seed: int, steps: int, shuffle_rewards: bool) -> None:
    """Play and train until both are through, showing a live table."""
    play_log, train_log = parts.out / "play.jsonl", parts.out / "train.jsonl"
    trainer = parts.start(
        "trainer",
        [
            *("-m", "examples.flight_desk.train", "--gateway", parts.gateway_url, "--model", str(parts.model)),
            *("--weights", str(parts.out / "weights"), "--steps", str(steps), "--seed", str(seed)),
            *("--log", str(train_log), *(["--shuffle-rewards"] if shuffle_rewards else [])),
        ],
    )
    players = parts.start(
        "players",
        [
            *("-m", "examples.flight_desk.play", "--gateway", parts.gateway_url, "--seed", str(seed)),
            *("--groups", str(steps * recipe.GROUPS_PER_STEP), "--log", str(play_log)),
        ],
    )
    played, trained = Tail(play_log), Tail(train_log)
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while trainer.is_running() or players.is_running():
            parts.check()
            for process in (trainer, players):
                if process.returncode not in (None, 0):
                    raise SystemExit(f"{process.name} failed; log {process.log_file}:\n{process.log_tail()}")
            live.update(live_table(played.read(), trained.read()))
            time.sleep(0.5)
        live.update(live_table(played.read(), trained.read()))


def _drain(parts: Parts, timeout_s: float = 60.0) -> None:
    """Wait until both sinks have committed every topic to its end."""
    deadline = time.monotonic() + timeout_s
    for group in ("rollstream.sink.clickhouse", "rollstream.sink.objects"):
        while not _is_read_to_the_end(parts.broker.bootstrap, group):
            parts.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"{group} is not through after {timeout_s:g} s; see {parts.out / 'logs'}")


def _is_read_to_the_end(bootstrap: str, group: str) -> bool:
    """Whether nothing stands behind the group's committed offsets: the next event of every partition is its end."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "enable.partition.eof": True, "fetch.wait.max.ms": 10}
    )
    try:
        wanted = [
            TopicPartition(name, partition)
            for name, topic in consumer.list_topics(timeout=10).topics.items()
            if name.startswith("rollstream.")
            for partition in topic.partitions
        ]
        places = consumer.committed(wanted, timeout=10)
        consumer.assign([TopicPartition(place.topic, place.partition, max(place.offset, 0)) for place in places])
        ended: set[tuple[str, int]] = set()
        while len(ended) < len(wanted):
            message = consumer.poll(10)
            if message is None or message.error() is None or message.error().code() != KafkaError._PARTITION_EOF:
                return False
            ended.add((message.topic(), message.partition()))
        return True
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
