"""What the stand-in engine says, as pure functions: engine, load and comparison each call them, and share nothing else.

A token is a byte plus `FIRST_ID`. The chat template puts a start mark and the role's mark before a message and an end mark
behind it, so the prompt of a later turn begins with all ids of the earlier prompt and its output. What is sampled follows from
the prompt, the sampling parameters and the request id (call id and attempt, both in the stored record): of two equal prompts
each call has an output of its own, and an output that was given to another call is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rollstream.schemas.prompts import Ids
from rollstream.schemas.records import VersionSpan

FIRST_ID = 70_000
"""Id of byte 0: ids of three bytes, as real vocabularies have them."""
_START, _END = b"\x01", b"\x02"
_ROLES = {"system": b"\x03", "user": b"\x04", "assistant": b"\x05", "tool": b"\x06"}
_OPENING = _START + _ROLES["assistant"]
_LETTERS = bytes(range(0x20, 0x7F))
_MAX_TOKENS = 48
_SPAN_VERSIONS = 5


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the engine samples for one request."""

    tokens: bytes
    """One byte a token, the end mark included where the model stopped by itself."""
    logprobs: tuple[float, ...]
    """One each; multiples of 1/4096, so that f32 holds them exactly."""
    spans: tuple[VersionSpan, ...]
    """Which policy version sampled which tokens."""
    finish_reason: str
    """`stop` or `length`."""
    pause_ms: int
    """How long the engine takes between the first tokens and the last."""


def render(messages: Iterable[Mapping[str, object]]) -> bytes:
    """The prompt of a conversation, one byte a token.

    Raises: ValueError: a message has an unknown role or no text.
    """
    return b"".join(message_tokens(message) for message in messages) + _OPENING


def message_tokens(message: Mapping[str, object]) -> bytes:
    """A message inside a prompt. Raises: as `render`."""
    role, content = message.get("role"), message.get("content") or ""
    if role not in _ROLES or not isinstance(content, str):
        raise ValueError(f"cannot render {message!r}: expected a role of {sorted(_ROLES)} and text")
    return _START + _ROLES[role] + content.encode() + _END


def sample(prompt: bytes, *, request_id: str, temperature: float, max_tokens: int, seed: int | None) -> Sampled:
    """What follows a prompt. Args: prompt: one byte a token. max_tokens: at least 1."""
    key = f"{request_id}\0{temperature!r}\0{max_tokens}\0{seed}\0".encode() + prompt
    noise = hashlib.shake_128(key).digest(8 + 3 * _MAX_TOKENS)
    wanted = 4 + noise[0] % (_MAX_TOKENS - 4)
    count = min(wanted, max_tokens)
    letters = bytes(_LETTERS[value % len(_LETTERS)] for value in noise[8 : 8 + count])
    is_whole = wanted <= max_tokens
    tokens = letters[:-1] + _END if is_whole else letters
    raw = noise[8 + _MAX_TOKENS :]
    logprobs = tuple(-(1 + raw[2 * at] + 256 * (raw[2 * at + 1] % 64)) / 4096 for at in range(count))
    version = noise[1] % _SPAN_VERSIONS
    cut = noise[2] % count
    spans: tuple[VersionSpan, ...] = (VersionSpan(0, count, version),)
    if cut and noise[3] % 4 == 0:  # a quarter of the calls sees new weights on the way
        spans = (VersionSpan(0, cut, version), VersionSpan(cut, count, version + 1))
    return Sampled(tokens, logprobs, spans, "stop" if is_whole else "length", pause_ms=noise[4] % 64)


def text_of(tokens: bytes) -> str:
    """The text of an answer: its tokens without the end mark."""
    return tokens.removesuffix(_END).decode()


def to_ids(tokens: bytes) -> Ids:
    """Token ids, shape [T]."""
    return np.frombuffer(tokens, dtype=np.uint8).astype(np.uint32) + np.uint32(FIRST_ID)


def from_ids(ids: Ids) -> bytes:
    """One byte a token. Raises: ValueError: an id is not one of this engine's."""
    if len(ids) and not (FIRST_ID <= int(ids.min()) and int(ids.max()) < FIRST_ID + 256):
        raise ValueError(f"ids from {ids.min()} to {ids.max()}: expected {FIRST_ID} to {FIRST_ID + 255}")
    return (ids - np.uint32(FIRST_ID)).astype(np.uint8).tobytes()
