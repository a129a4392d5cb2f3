"""A tokenizer and a Qwen2 model small enough to learn the flight desk on one core.

The vocabulary holds the 256 bytes and one token for each word that the desk and the calls use, so the usual call is
about six tokens and yet any text can be encoded and comes back unchanged. The chat template re-renders an echoed
assistant message, with its calls, to exactly the text that was sampled: prompt + output of one call is a token prefix
of the next prompt. Called by the demo's set-up; the folder it writes loads in transformers and in vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from . import desk

END: Final = "<|im_end|>"
START: Final = "<|im_start|>"
PAD: Final = "<|endoftext|>"
MAX_TOKENS: Final = 512
"""Longest context. The longest rollout of the desk is about a third of it."""

# The tools list is deliberately not rendered: the model meets one fixed set of tools, so the list would add a few
# hundred equal tokens to every prompt and teach nothing. The calls are written in the hermes form.
CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- elif message.content %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: known words are one token each, everything else falls back to its bytes."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Added tokens are found before any splitting. A splitting rule of our own would be lost: AutoTokenizer replaces the
    # splitter of every qwen2 folder by the one of the real Qwen2.
    backend.add_tokens([AddedToken(word, normalized=False) for word in _words()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Build the untrained model; the same seed gives the same weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32: vLLM's CPU attention takes none smaller
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    # Every value is spelled out: engines take what is written here as their default, and transformers cuts to the 50
    # likeliest tokens when nothing is written, which would change the log-probabilities.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration, tokenizer and template to a folder that transformers and vLLM load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def load(folder: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Read back what `save` wrote."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def _words() -> list[str]:
    """The pieces that are one token, each once; single characters are bytes already."""
    calls = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "search", "arguments": {',
        '{"name": "filter", "arguments": {"before": "',
    ]
    calls += [f'{{"name": "{name}", "arguments": {{"row": ' for name in ("check_seat", "order")]
    calls += ['", "sort": "', '"}}', "}}"]
    roles = ["system\n", "user\n", "assistant\n", "tool\n"]
    answers = [
        " flights",
        " has seats",
        " sold out",
        " checked already",
        "check ",
        " first",
        "booked",
        ", desk closed",
    ]
    answers += ["desk closed", "search first", "filter first", "no such row", "bad arguments", "unknown tool"]
    task = [" to ", ": book the cheapest flight before ", *desk.CITIES]
    names = [f" {airline}{number}" for airline in desk.AIRLINES for number in range(10, 20)]
    times = [f" {time}" for time in desk.EARLY_TIMES + desk.LATER_TIMES]
    prices = [f" {price}" for price in desk.LATER_PRICES + desk.EARLY_PRICES]
    return list(
        dict.fromkeys(calls + roles + answers + task + list(desk.LIMITS + desk.SORTS) + names + times + prices)
    )
