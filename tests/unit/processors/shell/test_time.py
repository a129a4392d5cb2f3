"""How far time passes for a stage while something upstream is under way: a broker that is slow, a scorer that is slower."""

from __future__ import annotations

from rollstream.processors.shell.messages import Outgoing
from tests.source_log import source_log
from tests.unit.processors.records import OPENED_MS, a_rollout, some_credits
from tests.unit.processors.shell.line import Line
from tests.unit.processors.shell.log import Log
from tests.unit.processors.shell.stages import Gather, Join, ended, opened

HOUR_MS = 3_600_000


async def test_slow_scorers_lose_no_group() -> None:
    """Scorers take longer than any deadline, and some wait for their turn meanwhile: build lets go of no rollout."""
    line = Line()
    for noun, record in source_log(groups=10, size=3, seed=1, start_ms=OPENED_MS):
        line.write(noun, record)
    line.start()

    for hours in range(2, 6):
        line.go_on(OPENED_MS + hours * HOUR_MS)
    running = len(line.running)
    await line.end_scorers()
    line.go_on(OPENED_MS + 6 * HOUR_MS)

    assert 16 == running
    assert ([], {f"g-{number}" for number in range(10)}) == (line.reasons(), line.built())
    assert {0} == set(line.partition.held.values())


def test_time_passes_for_build_while_younger_rollouts_are_scored() -> None:
    """There may always be a scorer that runs; what is older than all of them and left over is let go of."""
    line = Line()
    line.write("credits", some_credits([a_rollout("gone-1"), a_rollout("gone-2")], [1.0, 0.0]))
    line.start()
    line.go_on(OPENED_MS + HOUR_MS)
    before = line.reasons()

    for noun, record in source_log(groups=2, size=2, seed=1, start_ms=OPENED_MS + 2 * HOUR_MS):
        line.write(noun, record)
    line.go_on(OPENED_MS + 2 * HOUR_MS + 120_000)

    assert 4 == len(line.running)
    assert ([], ["already_done"]) == (before, line.reasons())


def _sent(log: Log) -> list[tuple[Outgoing, int]]:
    """What the broker takes and does not acknowledge yet."""
    taken = [(outgoing, log.take(outgoing)) for outgoing in log.partition.outbox]
    log.partition.outbox.clear()
    return taken


def test_time_passes_downstream_up_to_what_is_under_way() -> None:
    """In a busy partition something is on its way at every tick; group hears the time at which the oldest of it began."""
    log = Log(lambda: [Join(), Gather()])
    log.start()
    unacknowledged: list[tuple[Outgoing, int]] = []
    for number, now_ms in enumerate((10_000, 11_000, 12_000, 13_000)):
        log.now_ms = now_ms
        for noun in ("calls", "environment", "terminals"):
            rollout = f"r{number}"
            log.write("calls", opened(rollout)) if noun == "calls" else None
            log.write(noun, ended(rollout))
        for noun in log.partition.nouns:
            log.read(noun)
        before, unacknowledged = unacknowledged, _sent(log)
        for outgoing, offset in before:
            outgoing.on_ack(outgoing, offset)
        log.read("rollouts")
        log.partition.tick()

    heard: dict[str, list[int]] = {stage.name: stage.ticks for stage in log.stages}  # type: ignore[attr-defined]
    assert {"join": [10_000, 11_000, 12_000, 13_000], "group": [10_000, 11_000, 12_000]} == heard


def test_time_stands_still_downstream_where_a_tick_has_left_something() -> None:
    """Join closes what has expired in parts: group hears of no time at which a rollout is still to be closed."""
    log = Log(lambda: [_Leaving(), Gather()])
    log.start()
    for now_ms in (10_000, 11_000, 12_000, 13_000):
        log.now_ms = now_ms
        log.read_all()
        log.partition.tick()

    assert [10_000, 10_500, 10_500, 13_000] == log.stages[1].ticks  # type: ignore[attr-defined]


class _Leaving(Join):
    """Has something left from the second tick until the fourth."""

    @property
    def pending_ms(self) -> int | None:
        return 10_500 if 1 < len(self.ticks) < 4 else None
