"""Any command: the variables from which the official OpenAI, Anthropic and Google clients take their address and key."""

from __future__ import annotations

from rollstream.producers.harnesses.base import Place, Setup


def command(place: Place) -> Setup:
    """Every client that is made without arguments talks to the rollout.

    Source: the clients of the constraints file: openai 3.57, anthropic 2.14, google-genai 3.6.
    """
    return Setup(
        {
            "OPENAI_BASE_URL": place.openai_url,
            "OPENAI_API_KEY": place.api_key,
            "ANTHROPIC_BASE_URL": place.root_url,
            "ANTHROPIC_API_KEY": place.api_key,
            "ANTHROPIC_AUTH_TOKEN": None,
            "GOOGLE_GEMINI_BASE_URL": place.root_url,
            "GEMINI_API_KEY": place.api_key,
            "GOOGLE_API_KEY": None,  # wins over GEMINI_API_KEY
            "GOOGLE_GENAI_USE_VERTEXAI": None,
            "GOOGLE_GENAI_USE_ENTERPRISE": None,
        }
    )
