"""The client for harness authors: open a rollout, tell what happened around its calls, finish it.

The calls themselves go through any OpenAI client, pointed at `base_url` with `api_key`:

    client = RolloutClient("http://127.0.0.1:8600")
    rollout = client.open_rollout(task_id="add-17-25", group_id="g-1", group_size=8)
    openai = OpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
    ...
    rollout.event("tool_result", {"stdout": "42"})
    rollout.finish("succeeded", {"reward": 1.0})

A record that was not acknowledged (503), or whose answer was lost, is sent again with the same identity, so it counts once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from rollstream.errors import BrokerError

_TRIES = 4
_PAUSE_S = 0.5
"""First pause before another try; each further one is twice as long."""
_RETRYABLE = (429, 500, 502, 503, 504)


class RolloutClient:
    """Opens rollouts at a gateway; keeps its connections, and may be used by many threads."""

    def __init__(self, base_url: str, admin_key: str | None = None, *, timeout_s: float = 60.0) -> None:
        """Args: base_url: the gateway's address. admin_key: `gateway.admin_key`, if one is set."""
        self._url = base_url.rstrip("/")
        self._admin_key = admin_key
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.Client(timeout=timeout_s, limits=limits)

    def open_rollout(
        self,
        task_id: str,
        *,
        group_id: str | None = None,
        group_size: int = 1,
        task: dict[str, Any] | None = None,
        rollout_id: str | None = None,
        attempt: int = 0,
        policy: str | None = None,
    ) -> OpenRollout:
        """Open a rollout attempt.

        Args: group_id: rollouts of one task that are compared; None puts the rollout into a group of its own. group_size: how
            many the group shall have. task: what scorers may read. rollout_id: None makes one.

        Raises: BrokerError: the gateway refused, or did not answer after several tries.
        """
        body = {
            "task_id": task_id,
            "task": task or {},
            "group_id": group_id,
            "group_size": group_size,
            "rollout_id": rollout_id or f"rollout-{uuid.uuid4().hex}",
            "attempt": attempt,
            "policy": policy,
        }
        return OpenRollout(self, self.post(f"{self._url}/rollouts", body, self._admin_key))

    def publish_policy(self, version: int, weights_ref: str, **more: Any) -> dict[str, Any]:
        """Have the engine serve these weights. Args: more: `policy`, `weights_digest`, `parent_version`, `step`."""
        body = {"version": version, "weights_ref": weights_ref, **more}
        return self.post(f"{self._url}/policies", body, self._admin_key)

    def stats(self) -> dict[str, Any]:
        """The gateway's counters."""
        answer: dict[str, Any] = self._http.get(f"{self._url}/stats").json()
        return answer

    def post(self, url: str, body: Any, key: str | None) -> dict[str, Any]:
        """Send until it is acknowledged.

        Raises: BrokerError: reason `refused` (sending again will not help) or `not_acknowledged`.
        """
        headers = {"authorization": f"Bearer {key}"} if key else {}
        problem = ""
        for tries in range(_TRIES):
            if tries:
                time.sleep(_PAUSE_S * 2 ** (tries - 1))
            try:
                answer = self._http.post(url, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.is_success:
                values: dict[str, Any] = answer.json()
                return values
            problem = f"{answer.status_code}: {answer.text[:500]}"
            if answer.status_code not in _RETRYABLE:
                raise BrokerError(f"the gateway refuses POST {url}: {problem}", reason="refused")
        raise BrokerError(
            f"the gateway did not take POST {url} in {_TRIES} tries: {problem}", reason="not_acknowledged"
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenRollout:
    """One open rollout attempt."""

    def __init__(self, client: RolloutClient, opened: dict[str, Any]) -> None:
        """Made by `RolloutClient.open_rollout`."""
        self._client = client
        self.rollout_id: str = opened["rollout_id"]
        """The rollout."""
        self.attempt: int = opened["attempt"]
        """Its attempt."""
        self.group_id: str = opened["group_id"]
        """Its group."""
        self.base_url: str = opened["base_url"]
        """`base_url` for an OpenAI client."""
        self.api_key: str = opened["api_key"]
        """`api_key` for an OpenAI client."""
        self._url = self.base_url.removesuffix("/v1")

    def event(
        self,
        kind: str,
        content: Any = None,
        reward: float | None = None,
        *,
        call_id: str | None = None,
        is_executable: bool | None = None,
        state_key: str | None = None,
        event_id: str | None = None,
    ) -> str:
        """Write one environment event. Returns: its id.

        Args: kind: an `EventKind`: observation, tool_result, state, artifact or reward. content: any JSON. reward: of the call.
            call_id: the `id` of the answer that this follows.

        Raises: BrokerError: as `RolloutClient.post`.
        """
        body = {
            "event_id": event_id,
            "kind": kind,
            "content": content,
            "reward": reward,
            "call_id": call_id,
            "is_executable": is_executable,
            "state_key": state_key,
        }
        return self.events([body])[0]

    def events(self, events: Sequence[Mapping[str, Any]]) -> list[str]:
        """Write several environment events at once, in order. Returns: their ids.

        Args: events: the arguments of `event` by name; `kind` is required.

        Raises: BrokerError: as `RolloutClient.post`.
        """
        body = [{**event, "event_id": event.get("event_id") or f"event-{uuid.uuid4().hex}"} for event in events]
        if not body:
            return []
        event_ids: list[str] = self._client.post(f"{self._url}/events", body, self.api_key)["event_ids"]
        return event_ids

    def finish(self, status: str = "succeeded", outcome: dict[str, Any] | None = None) -> None:
        """Close the rollout.

        Args: status: a `RolloutStatus`: succeeded, failed, truncated, aborted or timed_out. outcome: what scorers read, for
            instance `{"reward": 1.0}`.

        Raises: BrokerError: as `RolloutClient.post`.
        """
        self._client.post(f"{self._url}/finish", {"status": status, "outcome": outcome or {}}, self.api_key)
