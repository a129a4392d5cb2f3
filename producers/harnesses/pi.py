"""Pi, by `models.json` and `settings.json` in an agent folder of its own.

Source: the documentation in Pi 1.6.0. It can speak all protocols; chat is the one in which it keeps thoughts and compact JSON.
"""

from __future__ import annotations

import json

from rollstream.producers.harnesses.base import KEY_VARIABLE, Place, Setup

_PROVIDER = "rollout"


def pi(place: Place) -> Setup:
    """See the module. Without `context_tokens` it takes the window for 128,000."""
    window = {} if place.context_tokens is None else {"contextWindow": place.context_tokens}
    provider = {
        "baseUrl": place.openai_url,
        "api": "openai-completions",
        "apiKey": f"${KEY_VARIABLE}",
        "models": [{"id": place.model, **window}],
    }
    settings = {"defaultProvider": _PROVIDER, "defaultModel": place.model, "enableInstallTelemetry": False}
    return Setup(
        {"PI_CODING_AGENT_DIR": str(place.home), "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        {
            "models.json": json.dumps({"providers": {_PROVIDER: provider}}, indent=2),
            "settings.json": json.dumps(settings, indent=2),
        },
    )
