"""Opening, events, ends and policies through the gateway's HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.schemas.records import (
    EnvironmentEvent,
    EventKind,
    PolicyVersion,
    RolloutOpened,
    RolloutStatus,
    Terminal,
)
from tests.unit.producers.fakes import Rig, started_gateway


def headers(opened: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {opened['api_key']}"}


def url(opened: dict[str, Any], what: str) -> str:
    return opened["base_url"].removesuffix("/v1") + f"/{what}"


async def test_opening_is_recorded_and_tells_where_to_go(tmp_path: Path) -> None:
    """The record holds what the harness said; the answer holds address and key."""
    async with started_gateway(tmp_path, public_url="https://gw.example/x/") as rig:
        opened = await rig.open("r-1", group_id="g-1", group_size=4, attempt=2, task={"q": "é"})

        assert "https://gw.example/x/r/r-1/a/2/v1" == opened["base_url"]
        assert [RolloutOpened("r-1", 2, "g-1", 4, "t", 1_000_000, '{"q":"é"}', "default")] == rig.publisher.records  # type: ignore[arg-type]


async def test_rollout_without_a_group_is_its_own(tmp_path: Path) -> None:
    """The group is the key of every topic, so there is always one."""
    async with started_gateway(tmp_path) as rig:
        opened = (await rig.admin.post("/rollouts", json={"task_id": "t"})).json()

        assert opened["rollout_id"] == opened["group_id"]


async def test_event_is_recorded_as_given(tmp_path: Path) -> None:
    """One event or a list; a content is any JSON."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open(group_id="g-1")
        full = {"event_id": "e-1", "kind": "tool_result", "content": [1, None], "call_id": "c-1", "reward": 1,
                "is_executable": False, "state_key": "s"}  # fmt: skip
        one = await rig.http.post(url(opened, "events"), json=full, headers=headers(opened))
        two = await rig.http.post(url(opened, "events"), json=[{"kind": "state"}] * 2, headers=headers(opened))

        assert ({"event_ids": ["e-1"]}, 2) == (one.json(), len(set(two.json()["event_ids"])))
        wanted = EnvironmentEvent(
            "e-1",
            "r-1",
            0,
            "g-1",
            EventKind.TOOL_RESULT,
            "[1,null]",
            1_000_000,
            "c-1",
            1.0,
            False,
            "s",  # type: ignore[arg-type]
        )
        assert wanted == rig.publisher.records[1]


async def test_end_stands_last_in_each_topic_in_order(tmp_path: Path) -> None:
    """Calls, environment, terminals; a repeated finish writes equal bytes."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open(group_id="g-1", group_size=2)
        body = {"status": "succeeded", "outcome": {"reward": 1.0}, "expected_events": 3}
        for now in (5_000_000, 6_000_000):
            rig.now[0] = now
            answer = await rig.http.post(url(opened, "finish"), json=body, headers=headers(opened))
            assert 200 == answer.status_code

        terminal = Terminal(
            "r-1",
            0,
            "g-1",
            2,
            "t",
            RolloutStatus.SUCCEEDED,
            5_000_000,
            '{"reward":1.0}',
            None,
            3,  # type: ignore[arg-type]
        )
        assert [("calls", terminal), ("environment", terminal), ("terminals", terminal)] * 2 == rig.publisher.written[
            1:
        ]


@pytest.mark.parametrize("what", ["open", "event", "finish"])
async def test_answer_waits_for_the_acknowledgement(tmp_path: Path, what: str) -> None:
    """Without Kafka each of them is a retryable 503."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        rig.publisher.held = True
        body, target = {
            "open": ({"task_id": "t"}, "/rollouts"),
            "event": ({"kind": "state"}, url(opened, "events")),
            "finish": ({"status": "failed"}, url(opened, "finish")),
        }[what]
        client = rig.admin if what == "open" else rig.http
        answer = await client.post(target, json=body, headers=headers(opened))

        assert (503, "2", "ack_timeout") == (
            answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "body", "says"),
    [
        ("events", {"kind": "tool_resul"}, "nearest is 'tool_result'"),
        ("events", {"kind": "state", "reward": "1"}, "reward='1'"),
        ("events", 3, "expected an object"),
        ("finish", {"status": "succeded"}, "nearest is 'succeeded'"),
        ("finish", {"status": "failed", "outcome": 3}, "outcome=3"),
        ("finish", [], "expected an object"),
    ],
)
async def test_wrong_field_is_named(tmp_path: Path, what: str, body: object, says: str) -> None:
    """A 400 says which field is wrong and what would be right."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        answer = await rig.http.post(url(opened, what), json=body, headers=headers(opened))

        assert (400, True) == (answer.status_code, says in answer.json()["error"]["message"])
        assert 1 == len(rig.publisher.records)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"task_id": ""},
        {"task_id": "t", "rollout_id": "a/b"},
        {"task_id": "t", "group_size": 0},
        {"task_id": "t", "group_size": 2**63},
        {"task_id": "t", "policy": "other"},
    ],
)
async def test_opening_with_a_wrong_field_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    """Nothing is recorded."""
    async with started_gateway(tmp_path) as rig:
        answer = await rig.admin.post("/rollouts", json=body)

        assert (400, []) == (answer.status_code, rig.publisher.records)


async def test_admin_key_guards_opening_and_policies(tmp_path: Path) -> None:
    """Where one is set, only its holder opens rollouts and changes weights; a rollout's key does not do."""
    async with started_gateway(tmp_path, admin_key="boss") as rig:
        with_key = {"authorization": "Bearer boss"}
        opened = await rig.admin.post("/rollouts", json={"task_id": "t"}, headers=with_key)
        statuses = [
            (await rig.admin.post("/rollouts", json={"task_id": "t"})).status_code,
            (await rig.admin.post("/policies", json={}, headers=headers(opened.json()))).status_code,
        ]

        foreign = await rig.admin.post(
            "/rollouts", json={}, headers={"authorization": "Bearer h\u00e9".encode("latin-1")}
        )

        assert (201, [401, 401], 401) == (opened.status_code, statuses, foreign.status_code)


async def test_policy_is_loaded_before_it_is_announced(tmp_path: Path) -> None:
    """The engine serves the weights when the record says that it may."""
    async with started_gateway(tmp_path) as rig:
        body = {"version": 3, "weights_ref": "/w/3", "parent_version": 2, "step": 30, "weights_digest": "d"}
        answer = await rig.admin.post("/policies", json=body)

        assert {"policy": "default", "version": 3} == answer.json()
        assert [(3, "/w/3")] == rig.engine.loaded
        assert [PolicyVersion("default", 3, "/w/3", 1_000_000, "d", 2, 30)] == rig.publisher.records


async def test_event_that_is_too_large_is_not_to_be_sent_again(tmp_path: Path) -> None:
    """413, and no hint to retry what can never be written."""
    async with started_gateway(tmp_path) as rig:
        opened = await rig.open()
        rig.publisher.broken = "too_large"
        answer = await rig.http.post(url(opened, "events"), json={"kind": "state"}, headers=headers(opened))

        assert (413, "too_large", None) == (
            answer.status_code, answer.json()["error"]["code"], answer.headers.get("retry-after"),
        )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"version": "3", "weights_ref": "/w"},
        {"version": 3},
        {"version": 3, "weights_ref": "/w", "policy": "other"},
    ],
)
async def test_policy_with_a_wrong_field_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    """Nothing is loaded."""
    async with started_gateway(tmp_path) as rig:
        answer = await rig.admin.post("/policies", json=body)

        assert (400, [], []) == (answer.status_code, rig.engine.loaded, rig.publisher.records)


async def test_models_lists_what_is_served(tmp_path: Path) -> None:
    """Some harnesses ask before they start."""
    async with started_gateway(tmp_path, model_name="tiny") as rig:
        opened = await rig.open()
        answer = await rig.http.get(opened["base_url"] + "/models", headers=headers(opened))

        assert ["tiny"] == [model["id"] for model in answer.json()["data"]]


async def test_published_policies_are_taken_from_the_log_but_not_ones_own(tmp_path: Path) -> None:
    """A restart serves what was last published, a replica follows, and what was published here is not loaded twice."""
    newest, others = PolicyVersion("default", 3, "/w/3", 1), PolicyVersion("default", 5, "/w/5", 2)
    log = FakePolicyLog(newest)
    async with started_gateway(tmp_path, policy_log=log) as rig:
        at_start = list(rig.engine.loaded)
        await rig.admin.post("/policies", json={"version": 4, "weights_ref": "/w/4"})
        log.come += [rig.publisher.records[-1], others]  # type: ignore[list-item]
        while len(rig.engine.loaded) < 3:
            await asyncio.sleep(0.001)

    assert ([(3, "/w/3")], [(3, "/w/3"), (4, "/w/4"), (5, "/w/5")]) == (at_start, rig.engine.loaded)


class FakePolicyLog:
    """Gives what a test puts into `come`, one record a read."""

    def __init__(self, *come: PolicyVersion) -> None:
        self.come = list(come)

    def newest(self, timeout_s: float) -> PolicyVersion | None:
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> PolicyVersion | None:
        return self.come.pop(0) if self.come else None

    def close(self) -> None:
        pass


async def test_key_of_one_replica_opens_another(tmp_path: Path) -> None:
    """Replicas share the secret and no state."""
    async with started_gateway(tmp_path / "a") as first, started_gateway(tmp_path / "b") as second:
        opened = await first.open()
        first_call, second_call = await asyncio.gather(first.chat(opened), _elsewhere(second, opened))

        assert (200, 200) == (first_call.status_code, second_call.status_code)


async def test_call_of_another_policys_rollout_is_refused(tmp_path: Path) -> None:
    """What this gateway samples would stand in the log under the name, and the versions, of a policy that did not play."""
    async with (
        started_gateway(tmp_path / "a", policy="other") as other,
        started_gateway(tmp_path / "b") as rig,
    ):
        answer = await _elsewhere(rig, await other.open())

        assert (400, "other_policy", []) == (
            answer.status_code,
            answer.json()["error"]["code"],
            rig.publisher.records,
        )


async def _elsewhere(rig: Rig, opened: dict[str, Any]) -> Any:
    rig.now[0] += 50
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    return await rig.http.post(opened["base_url"] + "/chat/completions", content=body, headers=headers(opened))
