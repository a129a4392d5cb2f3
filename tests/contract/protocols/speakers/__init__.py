"""Official clients by the protocol that they speak."""

from __future__ import annotations

from tests.contract.protocols.speakers.base import Speaker
from tests.contract.protocols.speakers.openai_chat import OpenAIChat

SPEAKERS: dict[str, type[Speaker]] = {
    "openai-chat": OpenAIChat,
}
"""Protocol's name in records → client."""
