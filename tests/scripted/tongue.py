"""How a scripted engine turns messages into ids and ids into text.

`BpeTongue` is a byte-level BPE with a ChatML template, trained on the spot: what a real model has, without weights.
`ToyTongue` is the toy vocabulary of the design notes (gateway.md §4.1), small enough to write prompts by hand.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.services.tiny_qwen import CHAT_TEMPLATE

Messages = Sequence[Mapping[str, Any]]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TRAINED_ON = (
    "system user assistant tool You are a helpful agent with tools. Answer with one number and nothing else.",
    '{"name": "read_file", "arguments": {"path": "notes.txt", "command": "echo hi"}} the file says 42, now write it',
    "def add(left: int, right: int) -> int:\n    return left + right\n\nassert add(1, 2) == 3\n",
    "这个系统把智能体的每一次调用变成可以信任的训练样本。 Перевод, café, naïve, 東京, 🙂",
)


class Tongue(Protocol):
    """Ids and text."""

    vocabulary_tokens: int
    """Number of ids."""
    end_id: int
    """The id that ends an answer."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, special tokens by their names; the canonical ones."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""

    def render(self, messages: Messages, tools: Any = None, **kwargs: Any) -> list[int]:
        """The ids of a conversation, up to where the assistant speaks."""


class BpeTongue:
    """A real tokenizer. Args: template: a jinja chat template; None is ChatML with Qwen's tools."""

    def __init__(self, template: str | None = None) -> None:
        self._bpe = _trained()
        self._template = _compiled(template or CHAT_TEMPLATE)
        self.vocabulary_tokens = self._bpe.get_vocab_size()
        self.end_id: int = self._bpe.token_to_id("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """As in `Tongue`."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """As in `Tongue`."""
        return str(self._bpe.decode(list(ids), skip_special_tokens=True))

    def bytes_of(self, text: str) -> list[int]:
        """A text as one id a byte: the longest split there is, and not the one that `encode` gives."""
        alphabet = _byte_symbols()
        return [self._bpe.token_to_id(alphabet[byte]) for byte in text.encode()]

    def render(self, messages: Messages, tools: Any = None, **kwargs: Any) -> list[int]:
        """As in `Tongue`; arguments of tool calls that are JSON objects go into the template as objects, as vLLM does it."""
        read = [_with_objects(message) for message in messages]
        return self.encode(self._template.render(messages=read, tools=tools, add_generation_prompt=True, **kwargs))


class ToyTongue:
    """Longest match over forty ids. Template: start, role, newline, content, end, newline."""

    vocabulary_tokens = 40
    end_id = 2
    vocabulary: ClassVar = {
        1: "<|im_start|>", 2: "<|im_end|>", 3: "\n", 4: "user", 5: "assistant", 6: "tool", 7: "<think>", 8: "</think>",
        9: "\n\n", 10: "a", 11: "b", 12: "ab", 13: "{", 14: "}", 15: '"x"', 16: ":", 17: ": ", 18: "1", 24: "S", 26: "TX",
        28: "ok", 29: "hi", 30: "system", 31: "E1", 32: "E2",
    }  # fmt: skip
    """Id → text; 20 to 23 are the four bytes of 😀."""

    def __init__(self) -> None:
        self._known = {text.encode(): token for token, text in self.vocabulary.items()}
        self._known |= {bytes([byte]): 20 + at for at, byte in enumerate("😀".encode())}
        self._longest = max(len(text) for text in self._known)

    def encode(self, text: str) -> list[int]:
        """As in `Tongue`. Raises: ValueError: a character is in no token."""
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            length = next((n for n in range(self._longest, 0, -1) if data[at : at + n] in self._known), 0)
            if not length:
                raise ValueError(f"cannot encode {text!r}: nothing matches at byte {at}")
            ids.append(self._known[data[at : at + length]])
            at += length
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """As in `Tongue`; half a character is U+FFFD."""
        emoji = "😀".encode()
        parts = [emoji[i - 20 : i - 19] if 20 <= i <= 23 else self.vocabulary[i].encode() for i in ids if i > 2]
        return b"".join(parts).decode(errors="replace")

    def render(self, messages: Messages, tools: Any = None, **kwargs: Any) -> list[int]:
        """As in `Tongue`."""
        ids: list[int] = []
        for message in messages:
            content = self.encode(message.get("content") or "")
            ids += [1, *self.encode(message["role"]), 3, *content, 2, 3]
        return [*ids, 1, 5, 3]


@functools.cache
def _trained() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_TRAINED_ON, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    return bpe


@functools.cache
def _byte_symbols() -> dict[int, str]:
    """Byte → the character that stands for it in a byte-level vocabulary. Source: GPT-2's bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@functools.cache
def _compiled(template: str) -> Any:
    """The template as transformers compiles it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        try:
            function["arguments"] = json.loads(function["arguments"])
        except (TypeError, ValueError):
            pass
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else dict(message)
