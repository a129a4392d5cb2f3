"""Options of `rollstream run`, and where it finds its gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from rollstream.cli import cli
from rollstream.errors import SettingsError
from rollstream.producers.harnesses import RECIPES, start
from rollstream.producers.harnesses.run import Job
from rollstream.producers.harnesses.verdict import ErrorIs
from rollstream.settings import GatewaySettings


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs, each with the body that would open its rollout and the address and key it would be sent with."""
    seen: list[Any] = []

    def run_job(job: Job, open_rollout: Any, environ: Any) -> int:
        seen.append(job)
        open_rollout()
        return 7

    def post(self: Any, url: str, body: Any, key: str | None) -> dict[str, Any]:
        seen.append((url, key, body))
        return {"rollout_id": "r", "attempt": 0, "group_id": "g", "base_url": f"{url}/v1", "api_key": "k"}

    monkeypatch.setattr(start, "run_job", run_job)
    monkeypatch.setattr("rollstream.producers.client.RolloutClient.post", post)
    return seen


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["run", *arguments], env={"ROLLSTREAM_GATEWAY__ADMIN_KEY": "boss"})


def test_options_before_the_command_are_ours_and_the_rest_is_its_own(played: list[Any]) -> None:
    """`--model` behind the program is the program's; the exit code is the job's."""
    result = invoke(
        *("--task-id", "t", "--task", '{"q": 1}', "--group-id", "g", "--group-size", "4", "--rollout-id", "r"),
        *("--attempt", "2", "--gateway", "http://gw.example/", "--context-tokens", "99", "--timeout", "5"),
        *("--check", "true", "--check-timeout", "6", "--error-is", "aborted"),
        *("codex", "exec", "--model", "theirs", "--", "do it"),
    )

    job, (url, key, body) = played
    assert 7 == result.exit_code, result.output
    assert (
        Job(
            ("codex", "exec", "--model", "theirs", "--", "do it"),
            RECIPES["codex"],
            "policy",
            context_tokens=99,
            check="true",
            check_timeout_s=6.0,
            timeout_s=5.0,
            error_is=ErrorIs.ABORTED,
        )
        == job
    )
    assert ("http://gw.example/rollouts", "boss") == (url, key)
    assert {"task_id": "t", "task": {"q": 1}, "group_id": "g", "group_size": 4, "rollout_id": "r", "attempt": 2} == {
        name: value for name, value in body.items() if value is not None
    }


def test_recipe_of_a_script_can_be_named(played: list[Any]) -> None:
    """A script that starts Claude Code needs its recipe."""
    invoke("--task-id", "t", "--gateway", "http://gw.example", "--recipe", "claude", "--model", "m", "./agent.sh")

    assert (RECIPES["claude"], "m", ErrorIs.FAILED) == (played[0].recipe, played[0].model, played[0].error_is)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--recipe", "codx", "nearest is 'codex'"),
        ("--recipe", "zzz", "expected one of"),
        ("--task", "{", "give a JSON object"),
        ("--task", "[1]", "expected a JSON object"),
    ],
)
def test_wrong_option_is_named_before_anything_happens(
    played: list[Any], option: str, value: str, message: str
) -> None:
    """With what was expected."""
    result = invoke("--task-id", "t", "--gateway", "http://gw.example", option, value, "true")

    assert isinstance(result.exception, SettingsError)
    assert ([], True, True) == (
        played,
        message in str(result.exception),
        repr(value) in str(result.exception) or json.dumps(value) in str(result.exception),
    )


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"admin_port": None}, "http://127.0.0.1:8600"),
        ({"admin_port": None, "host": "::1", "port": 9}, "http://[::1]:9"),
        ({"admin_port": 8601, "admin_host": "gw.example"}, "http://gw.example:8601"),
    ],
)
def test_rollouts_are_opened_at_the_admin_port_of_the_settings(settings: dict[str, Any], url: str) -> None:
    """Where there is none, the public port has the routes."""
    assert url == start.admin_url(GatewaySettings(**settings))


@pytest.mark.parametrize(
    ("settings", "name"), [({"admin_port": 0}, "admin_port"), ({"admin_port": None, "port": 0}, "port")]
)
def test_free_port_cannot_be_guessed(settings: dict[str, Any], name: str) -> None:
    """The error says what to give."""
    with pytest.raises(SettingsError, match=rf"gateway\.{name}=0 is any free port; give --gateway URL"):
        start.admin_url(GatewaySettings(**settings))
