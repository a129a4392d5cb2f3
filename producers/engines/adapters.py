"""LoRA adapters as versions of a policy: a name for each version that is never given to other weights, and a digest of its files.

An adapter that is replaced under its name may be sampled with keys and values that the one before left in the prefix cache
(vllm#42125); a name of its own for each version has a cache of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rollstream.producers.engines.base import LabelSpan

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version of a policy that is an adapter."""

    name: str
    """What the engine serves it under."""
    version: int
    """The policy version."""
    path: str
    """Where the engine reads it."""
    digest: str
    """Of its files; empty where this process cannot read them."""


def adapter_name(model: str, version: int) -> str:
    """The name of a version's adapter; no other version has it."""
    return f"{model}-v{version}"


def digest_adapter(path: str) -> str:
    """blake2b-128 over the names and bytes of an adapter's files. Returns: 32 hex digits; empty if there are none here."""
    digest, found = hashlib.blake2b(digest_size=16), False
    for file in (Path(path) / name for name in _FILES):
        if file.is_file():
            found = True
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    digest.update(block)
    return digest.hexdigest() if found else ""


def adapter_spans(adapter: Adapter, spans: tuple[LabelSpan, ...]) -> tuple[LabelSpan, ...]:
    """The engine's spans, which name the weights below an adapter, as spans of the adapter's version.

    A request names its adapter, so that one sampled every token. Where the weights below changed meanwhile, no version of the
    policy is what sampled, and the labels say both.
    """
    is_one = len({span.label for span in spans}) == 1
    return tuple(
        LabelSpan(span.start, span.end, str(adapter.version) if is_one else f"{adapter.name}@{span.label}")
        for span in spans
    )
