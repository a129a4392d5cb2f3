"""The client for harness authors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import pytest

from rollstream.errors import BrokerError
from rollstream.producers import RolloutClient, client

OPENED = {"rollout_id": "r", "attempt": 0, "group_id": "g", "base_url": "http://gw/r/r/a/0/v1", "api_key": "rs-k"}


class FakeGateway:
    """Answers from a list of statuses, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append((request.url.path, request.headers.get("authorization", ""), body))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 0:
            raise httpx.ReadError("reset")
        answer: dict[str, Any] = OPENED if request.url.path == "/rollouts" else {}
        if isinstance(body, list):
            answer = {"event_ids": [event["event_id"] for event in body]}
        return httpx.Response(status, json=answer)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSE_S", 0.0)


def connected(gateway: FakeGateway) -> RolloutClient:
    made = RolloutClient("http://gw/", "boss")
    made.close()
    made._http = httpx.Client(transport=httpx.MockTransport(gateway))
    return made


def test_rollout_goes_through_its_life() -> None:
    """Opened with the admin key; events and the end with the rollout's own."""
    gateway = FakeGateway()
    with connected(gateway) as made:
        rollout = made.open_rollout("t", group_id="g", group_size=4, task={"q": 1})
        event_id = rollout.event("tool_result", [1], 0.5, call_id="c")
        rollout.finish("failed", {"reward": 0.0})

    assert ["/rollouts", "/r/r/a/0/events", "/r/r/a/0/finish"] == [path for path, _, _ in gateway.requests]
    assert ["Bearer boss", "Bearer rs-k", "Bearer rs-k"] == [key for _, key, _ in gateway.requests]
    assert (event_id, [1], 0.5, "c") == tuple(
        gateway.requests[1][2][0][name] for name in ("event_id", "content", "reward", "call_id")
    )
    assert {"status": "failed", "outcome": {"reward": 0.0}} == gateway.requests[2][2]


@pytest.mark.parametrize("statuses", [(503,), (0, 502)])
def test_unacknowledged_record_is_sent_again_with_the_same_identity(statuses: tuple[int, ...]) -> None:
    """A lost answer makes no second event."""
    gateway = FakeGateway(200, *statuses)
    with connected(gateway) as made:
        made.open_rollout("t").event("state", 1)

    ids = {body[0]["event_id"] for path, _, body in gateway.requests if path.endswith("events")}
    assert (1, 2 + len(statuses)) == (len(ids), len(gateway.requests))


@pytest.mark.parametrize(
    ("statuses", "reason", "requests"), [((400,), "refused", 1), ((503,) * 4, "not_acknowledged", 4)]
)
def test_client_gives_up_with_a_reason(statuses: tuple[int, ...], reason: str, requests: int) -> None:
    """At once where it is the harness's fault, after some tries where it is not."""
    gateway = FakeGateway(*statuses)
    with connected(gateway) as made, pytest.raises(BrokerError) as error:
        made.open_rollout("t")

    assert (reason, requests) == (error.value.reason, len(gateway.requests))


def test_import_is_slim() -> None:
    """A harness gets neither torch nor Kafka nor Faust with the client, and the gateway no torch with vLLM."""
    code = (
        "import sys; from rollstream.producers import RolloutClient; found = [n for n in "
        "('torch', 'transformers', 'confluent_kafka', 'faust', 'starlette') if n in sys.modules]; "
        "import rollstream.producers.gateway.serve, rollstream.producers.engines.vllm; found += [n for n in "
        "('torch', 'transformers', 'faust') if n in sys.modules]; print(found)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "[]" == found.strip()
