"""A partition built again: fixed order, equal bytes, time as for a worker that kept up. No Kafka."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import yaml

from rollstream.processors.pipeline import Pipeline, load_pipeline
from rollstream.processors.shell.guard import DeadLetterGuard
from rollstream.processors.shell.replay import BACKLOG_MS, Replay, merged
from rollstream.schemas.codec import Codec
from rollstream.schemas.envelope import event_time_ms, to_message
from rollstream.schemas.records import DeadLetter, GroupBuilt, GroupScores, Terminal
from rollstream.schemas.topics import topics
from rollstream.snapshot import Logged
from tests.source_log import Entry, source_log
from tests.unit.processors.shell.racing_scorer import RNG, races
from tests.unit.processors.shell.stages import observed

CODEC = Codec()
START_MS = 1_700_000_000_000
DEADLINE_MS = 600_000
INPUTS = {noun: topics()[noun].name("old") for noun in ("calls", "environment", "terminals")}
PIPELINE = Path(__file__).parents[4] / "pipelines" / "default.yaml"


def _logged(log: Iterable[Entry]) -> dict[str, list[Logged]]:
    """A log by topic, appended as it happened."""
    found: dict[str, list[Logged]] = defaultdict(list)
    newest_ms = 0
    for noun, record in log:
        newest_ms = max(newest_ms, event_time_ms(record))
        m = to_message(record, CODEC, prefix="old", source="/test", noun=noun)
        found[noun].append(Logged(m.topic, 0, len(found[noun]), newest_ms, m.key, m.value, m.headers))
    return found


def _replay(log: dict[str, list[Logged]], pipeline: Pipeline | None = None) -> tuple[list[Logged], Replay]:
    written: list[Logged] = []
    pipeline = pipeline or load_pipeline(PIPELINE)

    async def run() -> Replay:
        replay = Replay(
            0,
            pipeline.build_stages(0),
            CODEC,
            topic_of=INPUTS,
            prefix="new",
            write=written.append,
            guard=DeadLetterGuard(1.0),
            max_work=4,
        )
        replay.begin(dict.fromkeys(INPUTS, 0))
        for noun, message in merged(log):
            await replay.read(noun, message)
        newest_ms = max(messages[-1].timestamp for messages in log.values())
        await replay.end({noun: len(messages) for noun, messages in log.items()}, newest_ms)
        replay.close()
        return replay

    return written, asyncio.run(run())


def _decoded(written: list[Logged], noun: str) -> list[object]:
    return [CODEC.decode(record.value or b"") for record in written if record.topic == topics()[noun].name("new")]


def test_replay_builds_every_group_and_holds_nothing() -> None:
    """A log whose rollouts are all finished leaves no group without samples."""
    written, replay = _replay(_logged(source_log(6, 3, seed=1, start_ms=START_MS)))

    assert {f"g-{n}" for n in range(6)} == {
        r.group_id for r in _decoded(written, "samples") if isinstance(r, GroupBuilt)
    }
    assert replay.groups == replay.built
    assert replay.held == dict.fromkeys(INPUTS, 0)


def test_replay_is_the_same_whatever_order_scorers_end_in(tmp_path: Path) -> None:
    """Two replays write the same records in the same order, with the same headers, though scorers race."""
    log = _logged(source_log(8, 3, seed=2, start_ms=START_MS))
    values = yaml.safe_load(PIPELINE.read_text("utf-8"))
    values["score"]["scorers"] = [{"name": "outcome", "kind": f"{races.__module__}:races"}]
    (tmp_path / "racing.yaml").write_text(yaml.safe_dump(values))
    outcomes = []
    for seed in (1, 2):
        RNG.seed(seed)
        outcomes.append(_replay(log, load_pipeline(tmp_path / "racing.yaml"))[0])

    scores = [record for record in _decoded(outcomes[0], "scores") if isinstance(record, GroupScores)]
    assert outcomes[0] == outcomes[1]
    assert len(scores) == 8
    assert {0} == {score.latency_ms for record in scores for score in record.scores}
    assert all(score.value for record in scores for score in record.scores)


def test_open_rollout_stays_open_until_the_log_is_older_than_its_deadline() -> None:
    """What was open when the log was last written is reported, not closed; later records let its deadline pass."""
    log = [entry for entry in source_log(1, 2, seed=4, start_ms=START_MS) if not _ends(entry, "g-0.r-1")]
    later = _logged([*log, *source_log(1, 1, seed=5, start_ms=START_MS + 3 * DEADLINE_MS)])

    early, replay = _replay(_logged(log))
    late, _ = _replay(later)

    assert [r.rollout_id for r in _decoded(early, "rollouts")] == ["g-0.r-0"]  # type: ignore[attr-defined]
    assert replay.held["calls"] > 0
    assert replay.groups - replay.built == {b"g-0"}
    ended = {r.rollout_id: r.status for r in _decoded(late, "rollouts") if r.opened_at_ms < START_MS + DEADLINE_MS}  # type: ignore[attr-defined]
    assert set(ended) == {"g-0.r-0", "g-0.r-1"}
    assert ended["g-0.r-1"] == "timed_out"


def test_rollouts_whose_scorers_run_for_hours_of_the_log_are_built() -> None:
    """Results are taken when all places are taken; however much later in the log that is, no stage gives their group up."""
    log = source_log(1, 2, seed=4, start_ms=START_MS)
    for hours in (2, 3, 4):  # tool results of nobody: nothing to score, but time passes
        log.append(("environment", observed("none", f"{hours}", group="none", at_ms=START_MS + hours * 3_600_000)))

    written, replay = _replay(_logged(log))

    assert {"g-0"} == {r.group_id for r in _decoded(written, "samples") if isinstance(r, GroupBuilt)}
    assert ["no_opening"] == [r.reason for r in _decoded(written, "dead-letters") if isinstance(r, DeadLetter)]
    assert {"calls": 0, "environment": 2, "terminals": 0} == replay.held


def _ends(entry: Entry, rollout_id: str) -> bool:
    return isinstance(entry[1], Terminal) and entry[1].rollout_id == rollout_id


def test_log_that_was_copied_later_is_read_like_a_backlog() -> None:
    """Append times long after what happened expire no rollout of which only a part has been read."""
    log = source_log(6, 3, seed=6, start_ms=START_MS)
    as_it_happened, _ = _replay(_logged(log))
    copied = _logged(log)
    for messages in copied.values():
        for at, message in enumerate(messages):
            messages[at] = replace(message, timestamp=START_MS + 10 * DEADLINE_MS + at * BACKLOG_MS)

    written, _ = _replay(copied)

    assert {m.value for m in written} == {m.value for m in as_it_happened}


def test_dead_letter_names_the_topic_that_was_read() -> None:
    """The original stands under the old prefix, and its id is the one that a worker there would give."""
    log = _logged(source_log(1, 2, seed=7, start_ms=START_MS))
    poison = Logged(INPUTS["calls"], 0, len(log["calls"]), START_MS + 60_000, b"k", b"\xff\xffpoison")
    log["calls"].append(poison)

    written, _ = _replay(log)

    (letter,) = _decoded(written, "dead-letters")
    assert isinstance(letter, DeadLetter)
    assert (letter.topic, letter.offset, letter.value) == (INPUTS["calls"], poison.offset, poison.value)
    (message,) = (m for m in written if m.key == letter.dead_letter_id.encode())
    assert (message.topic, message.partition) == ("new.dead-letters.v1", 0)


def test_inputs_come_by_append_time_then_noun_and_each_topic_in_its_order() -> None:
    """Clocks that go back do not reorder a topic."""

    def message(offset: int, at_ms: int) -> Logged:
        return Logged("t", 0, offset, at_ms, None, None)

    order = merged(
        {
            "environment": [message(0, 5), message(1, 20)],
            "calls": [message(0, 10), message(1, 5), message(2, 20)],
        }
    )

    assert [(noun, m.offset) for noun, m in order] == [
        ("environment", 0),
        ("calls", 0),
        ("calls", 1),
        ("calls", 2),
        ("environment", 1),
    ]
