"""Official clients by the protocol that they speak."""

from __future__ import annotations

from tests.contract.protocols.speakers.anthropic_messages import AnthropicMessages
from tests.contract.protocols.speakers.base import Speaker
from tests.contract.protocols.speakers.google_generate import GoogleGenerate
from tests.contract.protocols.speakers.openai_chat import OpenAIChat
from tests.contract.protocols.speakers.openai_completions import OpenAICompletions
from tests.contract.protocols.speakers.openai_responses import OpenAIResponses

SPEAKERS: dict[str, type[Speaker]] = {
    "anthropic-messages": AnthropicMessages,
    "google-generate": GoogleGenerate,
    "openai-chat": OpenAIChat,
    "openai-completions": OpenAICompletions,
    "openai-responses": OpenAIResponses,
}
"""Protocol's name in records → client."""
