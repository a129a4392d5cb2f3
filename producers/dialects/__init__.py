"""Client protocols: each file turns one protocol's requests into a `Request` and a call's outcome into its answer.

`base.py` says what a protocol is. The order of the tables decides who answers where a request fits no route, or a route of two:
the first that says `is_mine`, so those that are known by a header stand before those that are known by a path alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollstream.producers.dialects.anthropic_messages import Messages, MessagesTokenCount
from rollstream.producers.dialects.anthropic_models import AnthropicModels
from rollstream.producers.dialects.base import Dialect, ModelCatalog, Surface, TokenCounter
from rollstream.producers.dialects.google_generate import GenerateContent
from rollstream.producers.dialects.google_models import GoogleModels
from rollstream.producers.dialects.google_tokens import CountTokens
from rollstream.producers.dialects.openai_chat import ChatCompletions
from rollstream.producers.dialects.openai_completions import Completions
from rollstream.producers.dialects.openai_models import OpenAIModels
from rollstream.producers.dialects.openai_responses import Responses, ResponsesTokenCount

DIALECTS: dict[str, Dialect] = {
    dialect.protocol: dialect
    for dialect in (
        Messages(),
        GenerateContent(),
        ChatCompletions(),
        Completions(),
        Responses(),
    )
}  # fmt: skip
"""Name in records → protocol."""

COUNTERS: tuple[TokenCounter, ...] = (
    CountTokens(),
    MessagesTokenCount(),
    ResponsesTokenCount(),
)  # fmt: skip
"""Who answers how many tokens a prompt has."""

CATALOGS: tuple[ModelCatalog, ...] = (
    GoogleModels(),
    AnthropicModels(),
    OpenAIModels(),
)  # fmt: skip
"""Who answers which models there are."""

FALLBACK: Surface = DIALECTS["openai-chat"]
"""Whose errors a client gets that nobody knows."""


def surface_of(path: str, headers: Mapping[bytes, bytes]) -> Surface:
    """Whose client a request comes from. Args: path: below the attempt's root. headers: by lower-case name."""
    for surface in (*DIALECTS.values(), *COUNTERS, *CATALOGS):
        if surface.is_mine(path, headers):
            return surface
    return FALLBACK
