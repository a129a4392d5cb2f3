"""Codex, by a configuration file in a `CODEX_HOME` of its own, so that nobody's own configuration or login takes part.

Source: Codex 0.171.0, whose `--strict-config` takes this file. It speaks the Responses protocol alone, and asks for no output
limit: `gateway.max_output_tokens` is the one that counts.
"""

from __future__ import annotations

import json

from rollstream.producers.harnesses.base import KEY_VARIABLE, Place, Setup

_CONFIG = """\
model = {model}
model_provider = "rollout"
{window}check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.rollout]
name = "rollout"
base_url = {url}
env_key = {key_variable}
wire_api = "responses"
"""


def codex(place: Place) -> Setup:
    """See the module. The key is in the environment, under the name that the file gives."""
    window = "" if place.context_tokens is None else f"model_context_window = {place.context_tokens}\n"
    config = _CONFIG.format(
        model=json.dumps(place.model),
        window=window,
        url=json.dumps(place.openai_url),
        key_variable=json.dumps(KEY_VARIABLE),
    )
    return Setup({"CODEX_HOME": str(place.home)}, {"config.toml": config})
