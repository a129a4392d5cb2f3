"""What each harness is told: pure, and never the key in a file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rollstream.producers.harnesses import RECIPES, recipe_for
from rollstream.producers.harnesses.base import KEY_VARIABLE, Place

KEY = "rs-a-key"
PLACE = Place("http://gw.example/r/r-1/a/0", KEY, "policy", 40_000, Path("/homes/h"))
NAMELESS = Place(PLACE.root_url, KEY, 'it\'s a "model"', None, PLACE.home)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_leads_to_the_rollout_and_keeps_its_key_out_of_files(name: str) -> None:
    """The address is in the environment or in a file below the home; files hold the key's variable at most."""
    setup = RECIPES[name](PLACE)

    told = [*setup.files.values(), *(value for value in setup.environment.values() if value)]
    assert any(PLACE.root_url in text for text in told)
    assert not any(KEY in text for text in setup.files.values())
    assert not any(Path(file).is_absolute() or ".." in file for file in setup.files)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"command"}))
def test_harness_keeps_its_state_in_its_own_home(name: str) -> None:
    """What whoever starts it has configured takes no part."""
    assert str(PLACE.home) in RECIPES[name](PLACE).environment.values()


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("claude", "claude"),
        ("/opt/bin/codex", "codex"),
        ("./pi", "pi"),
        ("python", "command"),
        ("claude.py", "command"),
    ],
)
def test_recipe_is_found_by_the_name_of_the_program(program: str, name: str) -> None:
    """Whatever folder it is in; a program of another name is any command."""
    assert RECIPES[name] is recipe_for(program)


def test_command_points_every_official_client_at_the_rollout() -> None:
    """OpenAI's base ends in /v1; keys that would win over ours are taken away."""
    environment = RECIPES["command"](PLACE).environment

    assert [f"{PLACE.root_url}/v1", PLACE.root_url, PLACE.root_url] == [
        environment[name] for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")
    ]
    assert {KEY} == {environment[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")}
    assert [None, None] == [environment["ANTHROPIC_AUTH_TOKEN"], environment["GOOGLE_API_KEY"]]


def test_claude_asks_for_one_model_by_all_its_names_and_sends_no_nonce() -> None:
    """No call for titles, no attribution block, no other provider."""
    environment = RECIPES["claude"](PLACE).environment

    models = {value for name, value in environment.items() if "MODEL" in name}
    assert ({"policy"}, KEY) == (models, environment["ANTHROPIC_AUTH_TOKEN"])
    assert (None, None) == (environment["ANTHROPIC_API_KEY"], environment["CLAUDE_CODE_USE_BEDROCK"])
    assert ("0", "1", "40000") == (
        environment["CLAUDE_CODE_ATTRIBUTION_HEADER"],
        environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"],
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"],
    )
    assert RECIPES["claude"](NAMELESS).environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] is None


@pytest.mark.parametrize(("place", "window"), [(PLACE, 40_000), (NAMELESS, None)])
def test_codex_configuration_is_toml_with_a_provider_of_the_responses_protocol(
    place: Place, window: int | None
) -> None:
    """Names are quoted; the key is named by its variable; the window is said where it is known."""
    config = tomllib.loads(RECIPES["codex"](place).files["config.toml"])

    provider = config["model_providers"][config["model_provider"]]
    assert (place.model, window) == (config["model"], config.get("model_context_window"))
    assert (f"{place.root_url}/v1", KEY_VARIABLE, "responses") == (
        provider["base_url"],
        provider["env_key"],
        provider["wire_api"],
    )


@pytest.mark.parametrize(("place", "window"), [(PLACE, 40_000), (NAMELESS, None)])
def test_pi_starts_with_the_model_of_the_rollout(place: Place, window: int | None) -> None:
    """The default provider is the one that is made, and its key comes from the environment."""
    files = {name: json.loads(text) for name, text in RECIPES["pi"](place).files.items()}

    settings = files["settings.json"]
    provider = files["models.json"]["providers"][settings["defaultProvider"]]
    (model,) = provider["models"]
    assert (settings["defaultModel"], window) == (model["id"], model.get("contextWindow"))
    assert (place.openai_url, f"${KEY_VARIABLE}") == (provider["baseUrl"], provider["apiKey"])


@pytest.mark.parametrize(("place", "window"), [(PLACE, 40_000), (NAMELESS, None)])
def test_openclaw_knows_no_other_model(place: Place, window: int | None) -> None:
    """The catalog is replaced, and the primary model is the rollout's."""
    setup = RECIPES["openclaw"](place)

    config = json.loads(setup.files["openclaw.json"])
    (name, provider), *others = config["models"]["providers"].items()
    (model,) = provider["models"]
    assert ([], "replace") == (others, config["models"]["mode"])
    assert (f"{name}/{place.model}", window) == (
        config["agents"]["defaults"]["model"]["primary"],
        model.get("contextWindow"),
    )
    assert (place.openai_url, f"${{{KEY_VARIABLE}}}") == (provider["baseUrl"], provider["apiKey"])
    assert str(place.home / "openclaw.json") == setup.environment["OPENCLAW_CONFIG_PATH"]
