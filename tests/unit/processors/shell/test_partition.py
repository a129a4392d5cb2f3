"""One partition number: holding, emitting, reading back, dead letters, time. No Kafka."""

from __future__ import annotations

import asyncio

import pytest

from rollstream.errors import SchemaError, StageError
from rollstream.processors.base import Work
from rollstream.processors.shell.admission import Admission, kinds_by_topic
from rollstream.processors.shell.messages import read_used
from rollstream.schemas.records import DeadLetter
from tests.unit.processors.shell.log import CODEC, Log
from tests.unit.processors.shell.stages import SOURCES, Gather, Join, Relabel, ended, observed, opened


def _write_rollout(log: Log, rollout: str, *, group: str = "g", texts: tuple[str, ...] = ("a",)) -> None:
    log.write("calls", opened(rollout, group=group))
    for text in texts:
        log.write("environment", observed(rollout, text, group=group))
    for noun in ("calls", "environment", "terminals"):
        log.write(noun, ended(rollout, group=group))


def _dead_letters(log: Log) -> list[DeadLetter]:
    return [CODEC.decode(value) for value in log.values("dead-letters")]  # type: ignore[misc,arg-type]


def test_partition_commits_everything_once_all_is_done() -> None:
    """Two stages, one topic between them: all watermarks end at the logs' ends."""
    log = Log(lambda: [Join(), Gather()])
    for rollout in ("r1", "r2"):
        _write_rollout(log, rollout)
    log.start()

    log.read_all()
    log.commit()

    assert (2, 1) == (len(log.topics["rollouts"]), len(log.topics["groups"]))
    assert {noun: len(log.topics[noun]) for noun in log.committed} == log.committed
    assert {"calls": 4, "environment": 4, "terminals": 2, "rollouts": 2, "groups": 1} == log.committed


def test_output_names_the_highest_offsets_it_used() -> None:
    """The header `rs_used` tells, by topic, the last event that the record was made from."""
    log = Log(lambda: [Join()])
    log.write("calls", opened("other"))
    _write_rollout(log, "r1")
    log.start()

    log.read_all()

    assert {"calls": 2, "environment": 1, "terminals": 0} == read_used(log.topics["rollouts"][0].headers)


def test_inputs_stay_held_until_the_broker_acknowledges() -> None:
    """What was sent and not acknowledged may be lost, so its inputs are not committed."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1")
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    log.send(ack=False)

    before = log.partition.watermarks()
    for offset, outgoing in enumerate(log.unacked):
        outgoing.on_ack(outgoing, offset)

    assert {"calls": 0, "environment": 0, "terminals": 0, "rollouts": 0} == before
    assert {"calls": 2, "environment": 2, "terminals": 1, "rollouts": 0} == log.partition.watermarks()


def test_half_committed_rollout_is_not_rebuilt_from_its_half() -> None:
    """The hole: an open rollout pins `environment`, so of a finished one only a part is read again after a restart."""
    log = Log(lambda: [Join()])
    log.write("environment", observed("done", "a"))
    log.write("environment", observed("open", "x"))  # nothing behind it in `environment` can be committed
    log.write("environment", observed("done", "b"))
    log.write("calls", opened("done"))
    for noun in SOURCES:
        log.write(noun, ended("done"))
    log.start()
    log.read_all()
    log.commit()
    first = log.values("rollouts")
    assert {"calls": 2, "environment": 1, "terminals": 1, "rollouts": 0} == log.committed

    log.start()  # reads again: 'open:x', 'done:b', the barrier in `environment`, and the own output
    log.read_all()
    log.commit()

    assert first == log.values("rollouts")
    assert ["open/0"] == list(log.stages[0].open)  # type: ignore[attr-defined]
    assert {"calls": 2, "environment": 1, "terminals": 1, "rollouts": 0} == log.committed


def test_gate_keeps_and_drops_what_the_own_output_already_has() -> None:
    """A crash after the output and before the commit: all is read again, and nothing is written twice."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1")
    log.start()
    log.read_all()
    log.start()  # nothing was committed

    for noun in SOURCES:
        log.read(noun)
    kept = log.send()
    log.read("rollouts")
    log.read_all()
    log.commit()

    assert kept == 0
    assert len(log.topics["rollouts"]) == 1
    assert log.committed == {"calls": 2, "environment": 2, "terminals": 1, "rollouts": 1}


def test_gate_lets_go_once_the_own_output_was_read() -> None:
    """What the own output does not have is emitted after the gate has opened."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1")
    log.start()
    log.read_all()
    _write_rollout(log, "r2")
    log.start()

    for noun in SOURCES:
        log.read(noun)
    log.read("rollouts", upto=0)
    kept = log.send()
    log.read("rollouts")
    sent = log.send()

    assert (0, 1) == (kept, sent)


def test_gate_opens_over_markers_at_the_end() -> None:
    """The own output's end may lie behind the last record; and it is the end only once the reader has found no more."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1")
    partition = log.start()
    partition.begin({}, {"rollouts": 2})
    for noun in SOURCES:
        log.read(noun)

    sent = []
    for position, caught_up_ms in ((1, 5), (2, None), (2, 5)):
        partition.passed("rollouts", position, caught_up_ms)
        sent.append(len(partition.outbox))

    assert [0, 0, 1] == sent


def test_own_output_is_held_until_its_inputs_are_committed() -> None:
    """An own output that was committed before its inputs would not be read again, and the hole would be open."""
    log = Log(lambda: [Join()])
    log.write("environment", observed("open", "x"))
    _write_rollout(log, "r1")
    log.start()
    log.read_all()
    before = log.partition.watermarks()["rollouts"]

    log.write("calls", opened("open"))
    for noun in SOURCES:
        log.write(noun, ended("open"))
    log.read_all()

    assert (0, 2) == (before, log.partition.watermarks()["rollouts"])


def test_doubled_output_of_another_worker_finishes_the_item() -> None:
    """A zombie's output is read while ours is on its way: the item is done once, and all is committed."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1")
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    log.send(ack=False)
    log.topics["rollouts"].append(log.topics["rollouts"][0].__class__(1, 1, b"g", log.values("rollouts")[0], ()))

    log.read("rollouts")
    for outgoing in log.unacked:
        outgoing.on_ack(outgoing, 0)

    assert log.partition.watermarks() == {"calls": 2, "environment": 2, "terminals": 1, "rollouts": 2}


def test_own_records_are_not_decoded_again() -> None:
    """What this worker wrote comes back as the object it was; different bytes at its offset are decoded."""
    log = Log(lambda: [Join(), Gather()])
    _write_rollout(log, "r1")
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    sent = log.partition.outbox[0].record

    log.read_all()

    assert sent is log.stages[1].open["g/0"]["r1"][1]  # type: ignore[attr-defined]


def test_foreign_bytes_at_an_own_offset_are_decoded() -> None:
    """A log that was cut and written anew is believed, not what we remember of it."""
    log = Log(lambda: [Join(), Gather()])
    _write_rollout(log, "r1")
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    log.send()
    log.topics["rollouts"].clear()
    log.write("rollouts", _rollout_of("r9"))

    log.read("rollouts")

    assert ["r9"] == list(log.stages[1].open["g/0"])  # type: ignore[attr-defined]


def _rollout_of(name: str):  # type: ignore[no-untyped-def]
    log = Log(lambda: [Join()])
    _write_rollout(log, name)
    log.start()
    log.read_all()
    return CODEC.decode(log.values("rollouts")[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [b"", None, b"\x00\x00\x00\x00\x07abc", b"\xc3\x01" + b"12345678" + b"x"])
def test_undecodable_bytes_become_one_dead_letter(value: bytes | None) -> None:
    """They are kept whole, finished when acknowledged, and no stage sees them."""
    log = Log(lambda: [Join(), Gather()])
    log.write_bytes("rollouts", value)
    log.start()
    log.read("rollouts")
    before = log.partition.watermarks()["rollouts"]

    log.send()

    [letter] = _dead_letters(log)
    assert ("decode", "t.rollouts.v1", 0, 0) == (letter.boundary, letter.topic, letter.partition, letter.offset)
    assert (value or b"") == letter.value
    assert letter.reason in {"unknown_framing", "unknown_schema"}
    assert (0, 1) == (before, log.partition.watermarks()["rollouts"])


@pytest.mark.parametrize(("text", "reason"), [("poison", "poison"), ("refused", "refused")])
def test_event_a_stage_cannot_use_becomes_a_dead_letter(text: str, reason: str) -> None:
    """Raised or returned: the event goes to the dead letters, the others go on."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1", texts=("a", text))
    log.start()

    log.read_all()
    log.commit()

    [letter] = _dead_letters(log)
    assert ("join", reason, "r1", 1) == (letter.boundary, letter.reason, letter.rollout_id, letter.offset)
    assert len(log.topics["rollouts"]) == 1
    assert log.committed == {"calls": 2, "environment": 3, "terminals": 1, "rollouts": 1}


def test_dead_letters_are_the_same_after_a_restart() -> None:
    """Their identity is a function of position, boundary and reason."""
    log = Log(lambda: [Join()])
    log.write("environment", observed("r1", "poison"))
    for _ in range(2):
        log.start()
        log.read_all()

    first, second = log.values("dead-letters")

    assert first == second


def test_bug_in_a_stage_is_not_skipped() -> None:
    """Anything but our own errors ends the worker; the event stays uncommitted."""
    log = Log(lambda: [Join()])
    log.write("environment", observed("r1", "bug"))
    log.start()

    with pytest.raises(ZeroDivisionError):
        log.read("environment")

    assert log.partition.watermarks()["environment"] == 0


def test_too_many_dead_letters_stop_the_worker() -> None:
    """A bad deploy stops; it does not turn the log into dead letters."""
    log = Log(lambda: [Join()], limit=0.2)
    for number in range(300):
        log.write("environment", observed("r1", "poison" if number % 4 == 0 else "a"))
    log.start()

    with pytest.raises(StageError, match="dead_letter_limit") as caught:
        log.read("environment")

    assert caught.value.reason == "too_many_dead_letters"


def test_few_dead_letters_are_tolerated() -> None:
    """Below the limit the worker goes on, and a handful at the start proves nothing."""
    log = Log(lambda: [Join()], limit=0.2)
    for number in range(300):
        log.write("environment", observed("r1", "poison" if number < 10 or number % 10 == 0 else "a"))
    log.start()

    log.read("environment")

    assert len(log.partition.outbox) == 39


def test_malformed_used_header_is_a_dead_letter() -> None:
    """A foreign writer's header is told, not guessed."""
    log = Log(lambda: [Join()])
    record = _rollout_of("r1")
    log.write("rollouts", record)
    log.topics["rollouts"][0] = log.topics["rollouts"][0].__class__(
        0, 1, b"g", log.values("rollouts")[0], (("rs_used", b"[1]"),)
    )
    log.start()

    log.read_all()

    assert ["malformed_header"] == [letter.reason for letter in _dead_letters(log)]


def test_revoked_partition_ignores_what_comes_back() -> None:
    """Acknowledgements and results of an earlier assignment change nothing."""
    log = Log(lambda: [Join()])
    _write_rollout(log, "r1")
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    log.send(ack=False)

    log.partition.revoke()
    for outgoing in log.unacked:
        outgoing.on_ack(outgoing, 0)

    assert log.partition.watermarks()["calls"] == 0
    assert ["r1/0"] == list(log.stages[0].open)  # type: ignore[attr-defined]


def test_time_passes_only_at_the_end_of_all_inputs() -> None:
    """Behind in one topic, a stage hears no tick; a deadline would expire what is still to be read."""
    log = Log(lambda: [Join()], now_ms=50_000)
    _write_rollout(log, "r1")
    log.start()
    for noun in ("calls", "environment", "rollouts"):
        log.read(noun)
    log.partition.tick()
    before = list(log.stages[0].ticks)  # type: ignore[attr-defined]

    log.read("terminals")
    log.partition.tick()

    assert ([], [50_000]) == (before, log.stages[0].ticks)  # type: ignore[attr-defined]


def test_time_is_the_newest_event_when_that_is_later_than_the_clock() -> None:
    """Event time: records may be ahead of this worker's clock."""
    log = Log(lambda: [Join()], now_ms=1_500)
    _write_rollout(log, "r1")
    log.start()

    for noun in log.partition.nouns:
        log.read(noun)
    log.partition.tick()

    assert [2_000] == log.stages[0].ticks  # type: ignore[attr-defined]


def test_time_stands_still_downstream_while_something_is_on_its_way() -> None:
    """A rollout that is not acknowledged yet would be missing in a group closed by its deadline."""
    log = Log(lambda: [Join(), Gather()])
    _write_rollout(log, "r1")
    log.start()
    for noun in log.partition.nouns:
        log.read(noun)
    log.send(ack=False)
    log.partition.tick()
    before = [len(stage.ticks) for stage in log.stages]  # type: ignore[attr-defined]

    for outgoing in log.unacked:
        outgoing.on_ack(outgoing, 0)
    log.read_all()
    log.partition.tick()

    assert ([1, 0], [2, 1]) == (before, [len(stage.ticks) for stage in log.stages])  # type: ignore[attr-defined]


def test_work_runs_outside_and_comes_back() -> None:
    """A stage's slow work is handed out; its result is what the stage gets."""

    async def _answer() -> object:
        return 7

    log = Log(lambda: [Join(), Gather(lambda rollout: Work(rollout.rollout_id, _answer))])
    for rollout in ("r1", "r2"):
        _write_rollout(log, rollout)
    partition = log.start()
    log.read_all()

    while partition.work:
        running = partition.work.popleft()
        partition.work_done(running, asyncio.run(running.work.run()))  # type: ignore[arg-type]
    log.read_all()
    log.commit()

    assert log.stages[1].results == {"r1": 7, "r2": 7}  # type: ignore[attr-defined]
    assert log.committed["rollouts"] == 2
    assert len(log.topics["groups"]) == 1


def test_work_waits_behind_the_gate() -> None:
    """Nothing slow is started for what the own output may already have."""

    async def _answer() -> object:
        return 7

    log = Log(lambda: [Gather(lambda rollout: Work(rollout.rollout_id, _answer))])
    log.write("rollouts", _rollout_of("r1"))
    log.topics["groups"] = []
    log.start()
    log.read("rollouts")
    before = len(log.partition.work)

    log.read("groups")

    assert (0, 1) == (before, len(log.partition.work))


def test_stateless_stages_pass_on_and_commit() -> None:
    """Two stages without state behind one with: everything ends committed, keys and partition numbers stay."""
    log = Log(
        lambda: [Join(), Gather(), Relabel("score", "groups", "scores"), Relabel("reward", "scores", "rewards")]
    )
    for rollout in ("r1", "r2"):
        _write_rollout(log, rollout)
    log.start()

    log.read_all()
    log.commit()

    assert {noun: len(log.topics[noun]) for noun in log.partition.nouns} == log.committed
    assert len(log.topics["rewards"]) == 1
    assert {m.key for noun in ("rollouts", "groups", "rewards") for m in log.topics[noun]} == {b"g"}


def test_stage_that_reads_its_own_output_as_input_is_refused() -> None:
    """It could not tell its own outputs from its inputs."""
    with pytest.raises(ValueError, match="reads"):
        Log(lambda: [Relabel("score", "groups", "groups")]).start()


def test_first_dead_letters_stay_uncommitted_until_the_deploy_is_judged() -> None:
    """A bad deploy that is started again and again buries the same events, and never moves on through the topic."""
    log = Log(lambda: [Join()], limit=0.2)
    for number in range(300):
        log.write("environment", observed("r1", "poison" if number % 4 == 0 else "a"))

    for _ in range(3):
        log.start()
        log.read("environment", upto=99)
        log.send()
        with pytest.raises(StageError):
            log.read("environment")
        log.send()
        log.commit()

    assert log.committed["environment"] == 0


def test_dead_letters_are_committed_once_enough_records_were_good() -> None:
    """The hundredth record tells that this is the data's fault."""
    log = Log(lambda: [Join()], limit=0.2)
    for number in range(100):
        log.write("environment", observed("r1", "poison" if number == 0 else "a"))
    log.start()
    marks = []

    for upto in (99, 100):
        log.read("environment", upto)
        log.send()
        marks.append(log.partition.watermarks()["environment"])

    assert [0, 1] == marks


def test_dead_letters_are_committed_at_the_end_of_the_log() -> None:
    """With little traffic nothing waits for a hundred records: there is nothing that could be drained."""
    log = Log(lambda: [Join()], limit=0.2)
    log.write("environment", observed("r1", "poison"))
    log.start()
    log.read_all()
    before = log.partition.watermarks()["environment"]

    log.partition.tick()

    assert (0, 1) == (before, log.partition.watermarks()["environment"])


def test_event_whose_bytes_are_gone_still_becomes_a_dead_letter() -> None:
    """A stage rejects an event long after it was read; that it cannot be decoded any more does not stop the worker."""
    log = Log(lambda: [Join()])
    log.write("environment", observed("r1", "refused"))
    partition = log.start()
    log.read("environment")  # the gate is closed, so the reject is kept

    def _gone(_value: bytes) -> None:
        raise SchemaError("gone", reason="claim_missing")

    [reject] = partition._hosted[0].kept_rejects.values()
    reject.event._decode = _gone  # type: ignore[assignment]
    log.read_all()

    [letter] = _dead_letters(log)
    assert ("refused", None) == (letter.reason, letter.rollout_id)


def test_own_records_that_are_large_are_decoded_again() -> None:
    """What is kept between acknowledgement and read-back is bounded in bytes."""
    log = Log(lambda: [Join(), Gather()])
    log.write("calls", opened("r1"))
    log.write("environment", observed("r1", "x" * 9_000_000))
    for noun in SOURCES:
        log.write(noun, ended("r1"))
    log.start()
    for noun in ("rollouts", *SOURCES):
        log.read(noun)
    sent = log.partition.outbox[0].record

    log.read_all()

    found = log.stages[1].open["g/0"]["r1"][1]  # type: ignore[attr-defined]
    assert sent == found
    assert sent is not found


def test_record_of_another_topic_becomes_a_dead_letter_and_is_passed() -> None:
    """No stage sees it, and everybody who would have read it lets go of it."""
    log = Log(lambda: [Join(), Gather()], admission=Admission(kinds=kinds_by_topic()))
    log.write("rollouts", opened("r1"))
    log.start()

    log.read_all()
    log.commit()

    assert [("decode", "foreign_record")] == [(letter.boundary, letter.reason) for letter in _dead_letters(log)]
    assert 1 == log.committed["rollouts"]
