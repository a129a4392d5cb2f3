"""From the options of `rollstream run` and the gateway's settings to a job and its rollout."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from rollstream.errors import SettingsError
from rollstream.producers.client import OpenRollout, RolloutClient
from rollstream.producers.harnesses import RECIPES, recipe_for
from rollstream.producers.harnesses.base import Recipe
from rollstream.producers.harnesses.run import Job, run_job
from rollstream.producers.harnesses.verdict import ErrorIs
from rollstream.settings import GatewaySettings


def start(
    gateway: GatewaySettings,
    command: tuple[str, ...],
    *,
    task_id: str,
    task: str | None,
    group_id: str | None,
    group_size: int,
    rollout_id: str | None,
    attempt: int,
    gateway_url: str | None,
    recipe: str | None,
    model: str | None,
    context_tokens: int | None,
    check: str | None,
    check_timeout: float,
    timeout: float | None,
    error_is: str,
    home: Path | None,
) -> int:
    """Play one rollout. Returns: the exit code.

    Raises: SettingsError: an option is wrong. ServiceError, BrokerError: as `run_job`.
    """
    job = Job(
        command,
        recipe_for(command[0]) if recipe is None else _recipe(recipe),
        model=model or gateway.model_name,
        context_tokens=context_tokens,
        check=check,
        check_timeout_s=check_timeout,
        timeout_s=timeout,
        error_is=ErrorIs(error_is),
        home=home,
    )
    read_task = _object("--task", task)
    with RolloutClient(gateway_url or admin_url(gateway), gateway.admin_key) as client:

        def open_rollout() -> OpenRollout:
            return client.open_rollout(
                task_id,
                task=read_task,
                group_id=group_id,
                group_size=group_size,
                rollout_id=rollout_id,
                attempt=attempt,
            )

        return run_job(job, open_rollout, os.environ)


def admin_url(gateway: GatewaySettings) -> str:
    """Where the gateway of these settings opens rollouts.

    Raises: SettingsError: it takes a free port, which only its own output names.
    """
    is_own = gateway.admin_port is not None
    host, port = (gateway.admin_host, gateway.admin_port) if is_own else (gateway.host, gateway.port)
    if not port:
        name = "admin_port" if is_own else "port"
        raise SettingsError(f"cannot find the gateway: gateway.{name}=0 is any free port; give --gateway URL")
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        expected = f"nearest is {near[0]!r}" if near else f"expected one of {sorted(RECIPES)}"
        raise SettingsError(f"unknown --recipe {name!r}, {expected}")
    return RECIPES[name]


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as cause:
        raise SettingsError(f"cannot read {option}={text!r}: {cause}; give a JSON object") from cause
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {option}={text!r}: expected a JSON object")
    return value
