"""OpenClaw, by a configuration file and a state folder of its own; meant for `openclaw agent exec`.

Source: the documentation in OpenClaw 2026.9.6. `mode: replace` leaves the rollout's model as the only one there is, so that no
fallback goes elsewhere.
"""

from __future__ import annotations

import json

from rollstream.producers.harnesses.base import KEY_VARIABLE, Place, Setup

_PROVIDER = "rollout"
_CONFIG = "openclaw.json"


def openclaw(place: Place) -> Setup:
    """See the module."""
    window = {} if place.context_tokens is None else {"contextWindow": place.context_tokens}
    provider = {
        "baseUrl": place.openai_url,
        "api": "openai-completions",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "models": [{"id": place.model, "name": place.model, **window}],
    }
    config = {
        "models": {"mode": "replace", "providers": {_PROVIDER: provider}},
        "agents": {"defaults": {"model": {"primary": f"{_PROVIDER}/{place.model}"}}},
        "telemetry": {"enabled": False},
    }
    return Setup(
        {
            "OPENCLAW_STATE_DIR": str(place.home),
            "OPENCLAW_CONFIG_PATH": str(place.home / _CONFIG),
            "OPENCLAW_NO_AUTO_UPDATE": "1",
        },
        {_CONFIG: json.dumps(config, indent=2)},
    )
