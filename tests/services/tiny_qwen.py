"""A tiny Qwen2 model and tokenizer made on the spot, with no download, served alike by vLLM and by transformers.

The tokenizer is a byte-level BPE trained on a few shipped sentences; every text encodes, since the 256 bytes are in
the vocabulary. The weights are random and depend on the seed only. The ChatML template renders tools in Qwen's own
form, which is what vLLM's `hermes` tool parser reads. Needs torch and transformers of the calling environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY_TOKENS = 512
END_OF_TURN = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call functions within <tools></tools> tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message['role'] != 'system' or not loop.first %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] %}{{- message['content'] }}{%- endif %}
{%- for call in message.get('tool_calls') or [] %}
{%- set function = call['function'] %}
{{- '\\n<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
{{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_TEXT = (
    "system user assistant tool You are a helpful agent. Answer with one number and nothing else.",
    "What is the sum of 17 and 25? The answer is 42. Add the numbers 3, 5 and 8, then subtract 4.",
    'Call the tool: {"name": "calculator", "arguments": {"expression": "2 + 2 * 10"}} and read its result.',
    "The observation says that the file was not found; list the folder, open the right file and try again.",
    "def add(left: int, right: int) -> int:\n    return left + right\n\nassert add(1, 2) == 3\n",
    "An agent acts, the environment answers, a verifier scores the rollout, and the trainer updates the policy.",
    "这个系统把智能体的每一次调用变成可以信任的训练样本。 Перевод, café, naïve, 東京, 🙂",
)


def make_tiny_qwen(folder: Path, *, seed: int = 0, kv_heads: int = 2, max_length_tokens: int = 4096) -> Path:
    """Write config, weights (safetensors), tokenizer and chat template into the folder and return it.

    Args:
        folder: made when it is not there.
        seed: decides the weights; the same seed gives the same bytes, another seed another policy.
        kv_heads: 1 (grouped) or 2.
        max_length_tokens: the longest sequence that the model states it can take.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = max_length_tokens
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's CPU attention needs heads of 32 or more
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder)
    return folder


def make_tokenizer():  # type: ignore[no-untyped-def]  # transformers is not there when the types are checked
    """The byte-level BPE tokenizer with ChatML tokens; the same on every call.

    Normalizer and pre-tokenizer are Qwen2's own: whoever loads the folder by its model type (AutoTokenizer, vLLM)
    puts these in place of the ones in tokenizer.json, and other ones would give other ids.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    qwen = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen.normalizer, qwen.pre_tokenizer, qwen.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS - len(_TAGS),
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    print(make_tiny_qwen(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
