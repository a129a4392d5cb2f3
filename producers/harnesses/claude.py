"""Claude Code, by its environment; the settings, hooks and login of whoever starts it stay out of the rollout.

Source: variables that Claude Code 2.1.197 reads. It asks for several model names (its own, a small one for titles, one for
sub-agents), all of which are answered by the one model that is served.
"""

from __future__ import annotations

from rollstream.producers.harnesses.base import Place, Setup

_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
_ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_CUSTOM_HEADERS",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_GATEWAY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_VERTEX",
)
"""What would send calls elsewhere, or another key."""


def claude(place: Place) -> Setup:
    """See the module. `context_tokens` is when it compacts; it takes none below 100,000."""
    return Setup(
        {
            "ANTHROPIC_BASE_URL": place.root_url,
            "ANTHROPIC_AUTH_TOKEN": place.api_key,
            **dict.fromkeys(_MODELS, place.model),
            **dict.fromkeys(_ELSEWHERE, None),
            "CLAUDE_CONFIG_DIR": str(place.home),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a nonce at the head of every prompt, so that no prefix is ever equal
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # calls for titles, which no reward is about
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": None if place.context_tokens is None else str(place.context_tokens),
        }
    )
