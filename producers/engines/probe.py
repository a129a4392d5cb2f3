"""The questions that tell what an engine is, the same for every kind, and the fingerprint of its answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollstream.producers.engines.base import Conversation
from rollstream.schemas.identity import digest_json

PROBE_TEXT = 'Encoding probe: don\'t panic, 3.14 \u4f60\u597d \U0001f642\n\t<tool_call>{"a": [1, 2]}</tool_call>'
"""What tokenizers differ in: apostrophes, digits, other scripts, white space, tags."""
PROBE_CHAT = Conversation([{"role": "system", "content": "probe"}, {"role": "user", "content": "Say a word."}])
"""A conversation with a mark of each role that begins one."""
PROBE_LOGPROBS = 5
"""Likeliest tokens that are compared between two temperatures."""
PROBE_TOOLS = Conversation(
    [
        {"role": "user", "content": "Use it."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ],
    [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
)
"""A conversation with what templates differ in: tools, a thought of an earlier turn, a call and its result."""
PROBE_ANSWER = '<think>hm</think>ok<tool_call>\n{"name": "f", "arguments": {"b":  1}}\n</tool_call>'
"""A sampled text that parsers take apart."""


def fingerprint(
    *,
    tokens: Sequence[int],
    prompts: Sequence[Sequence[int]],
    template: object,
    parsers: object,
    message: dict[str, Any] | None,
) -> str:
    """Digest of what decides which ids a text is, and which message the ids are.

    Two engines with equal fingerprints gave equal answers to the probes; that they always would is not proven.

    Args: tokens: ids of `PROBE_TEXT`. prompts: ids of the probe conversations; an empty one was refused. template: the chat
        template, if the engine tells. parsers: names of the parsers, if it tells. message: `PROBE_ANSWER` as its parsers read it.
    """
    return digest_json(
        {
            "tokens": list(tokens),
            "prompts": [list(ids) for ids in prompts],
            "template": template,
            "parsers": parsers,
            "message": message,
        }
    )
