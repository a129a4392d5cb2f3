"""What frames the calls of a rollout, without HTTP: its opening, environment events, its end, and new policies.

Each record is acknowledged by Kafka before the answer. A client that got a retryable error sends the same again: equal
`event_id`s are duplicates, and a repeated finish is written as it was first.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollstream.producers.base import Publisher, acknowledged
from rollstream.producers.capability import Claims, mint_key
from rollstream.producers.dialects.base import RequestRefused
from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway.metrics import GatewayMetrics
from rollstream.producers.ids import new_id
from rollstream.producers.rollout_memory import MemoryOfRollouts
from rollstream.schemas.records import (
    EnvironmentEvent,
    EventKind,
    PolicyVersion,
    RolloutOpened,
    RolloutStatus,
    Terminal,
)
from rollstream.schemas.topics import TERMINAL_TOPICS
from rollstream.schemas.types import Json
from rollstream.settings import GatewaySettings

_NAME = re.compile(r"[A-Za-z0-9._:@=+-]{1,200}")
"""What may stand in a path without being quoted."""
_LARGEST = 2**63 - 1
"""Largest number that a record can hold."""


@dataclass(frozen=True, slots=True)
class OpenedRollout:
    """Where a harness finds its rollout."""

    claims: Claims
    """What its key says."""
    path: str
    """Path below the gateway's address, without the protocol's root."""
    api_key: str
    """Its key."""


_OPENING_FIELDS = ("task_id", "task", "group_id", "group_size", "rollout_id", "attempt", "policy")


class RolloutService:
    """Opens, feeds and closes rollouts."""

    def __init__(
        self,
        gateway: GatewaySettings,
        engine: Engine,
        publisher: Publisher,
        *,
        memory: MemoryOfRollouts,
        metrics: GatewayMetrics,
        secret: bytes,
        now_ms: Callable[[], int],
    ) -> None:
        self._settings = gateway
        self._engine = engine
        self._publisher = publisher
        self._memory = memory
        self._metrics = metrics
        self._secret = secret
        self._now_ms = now_ms
        self.announced: set[PolicyVersion] = set()
        """Versions that this process published itself; its own engine has them already."""

    async def open(self, values: dict[str, Any]) -> OpenedRollout:
        """Open a rollout attempt.

        Raises: RequestRefused: a field is wrong. BrokerError: not acknowledged; send it again.
        """
        for name in sorted(values.keys() - set(_OPENING_FIELDS)):
            near = difflib.get_close_matches(name, _OPENING_FIELDS, 1)
            _refuse(
                name, values[name], f"no such field; nearest is {near[0]!r}" if near else f"one of {_OPENING_FIELDS}"
            )
        now_ms = self._now_ms()
        rollout_id = _name(values, "rollout_id") or new_id("rollout", now_ms)
        claims = Claims(
            rollout_id=rollout_id,
            attempt=_whole(values, "attempt", 0, 0),
            group_id=_text(values, "group_id") or rollout_id,
            group_size=_whole(values, "group_size", 1, 1),
            task_id=_text(values, "task_id") or _refuse("task_id", values.get("task_id"), "a name of the task"),
            policy=self._policy(values),
            opened_at_ms=now_ms,
            expires_at_ms=now_ms + self._settings.key_ttl_s * 1000,
        )
        record = RolloutOpened(
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            group_id=claims.group_id,
            group_size=claims.group_size,
            task_id=claims.task_id,
            opened_at_ms=now_ms,
            task=_object(values, "task"),
            policy=claims.policy,
        )
        await self._publisher.publish(record, timeout_s=self._settings.ack_timeout_s)
        path = f"/r/{claims.rollout_id}/a/{claims.attempt}"
        return OpenedRollout(claims, path, mint_key(claims, self._secret))

    async def write_events(self, claims: Claims, values: Any) -> list[str]:
        """Write one event or a list of them. Returns: their ids.

        Raises: as `open`.
        """
        events = [self._event(claims, value) for value in (values if isinstance(values, list) else [values])]
        for future in [self._publisher.submit(event) for event in events]:
            await acknowledged(future, self._settings.ack_timeout_s)
        self._metrics.events.inc(len(events))
        return [event.event_id for event in events]

    async def finish(self, claims: Claims, values: dict[str, Any]) -> None:
        """Write the end of an attempt, last into each topic that a rollout is read from.

        An agent that was killed leaves calls whose outcomes are being written: the end waits for those, as long as for an
        acknowledgement, so that they are not late.

        Raises: as `open`.
        """
        memory = self._memory.of(claims.rollout_id, claims.attempt)
        leaving = memory.leaving()
        if leaving:
            await asyncio.wait(leaving, timeout=self._settings.ack_timeout_s)
        terminal = Terminal(
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            group_id=claims.group_id,
            group_size=claims.group_size,
            task_id=claims.task_id,
            status=RolloutStatus(_choice(values, "status", [status.value for status in RolloutStatus])),
            finished_at_ms=self._now_ms(),
            outcome=_object(values, "outcome"),
            expected_calls=_whole(values, "expected_calls", None, 0),
            expected_events=_whole(values, "expected_events", None, 0),
        )
        terminal = memory.terminal = memory.terminal or terminal
        for future in [self._publisher.submit(terminal, noun=noun) for noun in TERMINAL_TOPICS]:
            await acknowledged(future, self._settings.ack_timeout_s)

    async def publish_policy(self, values: dict[str, Any]) -> PolicyVersion:
        """Load weights into the engine, then tell everybody.

        Raises: as `open`. ProviderError: the engine did not take them.
        """
        if not isinstance(values.get("version"), int):
            _refuse("version", values.get("version"), "an integer")
        record = PolicyVersion(
            policy=self._policy(values),
            version=_whole(values, "version", 0, 0),
            weights_ref=_text(values, "weights_ref")
            or _refuse("weights_ref", values.get("weights_ref"), "where the weights are"),
            published_at_ms=self._now_ms(),
            weights_digest=_text(values, "weights_digest") or "",
            parent_version=_whole(values, "parent_version", None, 0),
            step=_whole(values, "step", None, 0),
        )
        self.announced.add(record)
        await self._engine.load_policy(record.version, record.weights_ref)
        if self._settings.engine_weights == "adapter":
            record = replace(record, adapter=self._engine.identity().adapter)
        self._metrics.version.set(record.version)
        await self._publisher.publish(record, timeout_s=self._settings.ack_timeout_s)
        return record

    def _policy(self, values: dict[str, Any]) -> str:
        """The policy that is served here; another one's versions would be given to what this one samples."""
        served, policy = self._settings.policy, _text(values, "policy")
        if policy not in (None, served):
            _refuse("policy", policy, f"{served!r}, which this gateway serves (gateway.policy)")
        return served

    def _event(self, claims: Claims, values: Any) -> EnvironmentEvent:
        if not isinstance(values, dict):
            raise RequestRefused(f"an event is {type(values).__name__}, expected an object", param="event")
        now_ms = self._now_ms()
        reward, is_executable = values.get("reward"), values.get("is_executable")
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            _refuse("reward", reward, "a number")
        if is_executable is not None and not isinstance(is_executable, bool):
            _refuse("is_executable", is_executable, "true or false")
        return EnvironmentEvent(
            event_id=_text(values, "event_id") or new_id("event", now_ms),
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            group_id=claims.group_id,
            kind=EventKind(_choice(values, "kind", [kind.value for kind in EventKind])),
            content=Json(orjson.dumps(values.get("content")).decode()),
            at_ms=now_ms,
            call_id=_text(values, "call_id"),
            reward=None if reward is None else float(reward),
            is_executable=is_executable,
            state_key=_text(values, "state_key"),
            content_ref=_text(values, "content_ref"),
        )


def _refuse(name: str, value: object, expected: str) -> Any:
    raise RequestRefused(f"{name}={value!r}: expected {expected}", param=name)


def _text(values: dict[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        _refuse(name, value, "text")
    return value


def _name(values: dict[str, Any], name: str) -> str | None:
    value = _text(values, name)
    if value is not None and not _NAME.fullmatch(value):
        _refuse(name, value, "up to 200 letters, digits and . _ : @ = + -")
    return value


def _whole(values: dict[str, Any], name: str, default: Any, low: int) -> Any:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _LARGEST:
        _refuse(name, value, f"an integer from {low} to {_LARGEST}")
    return value


def _object(values: dict[str, Any], name: str) -> Json:
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        _refuse(name, value, "an object")
    return Json(orjson.dumps(value or {}).decode())


def _choice(values: dict[str, Any], name: str, known: list[str]) -> str:
    value = values.get(name)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1)
        _refuse(name, value, f"one of {known}" + (f"; nearest is {near[0]!r}" if near else ""))
    return str(value)
