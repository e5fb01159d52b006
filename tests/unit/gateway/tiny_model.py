"""A tiny real model with a byte-level tokenizer: a token id is a byte, so tests write tokens as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

IM_START, IM_END, BOS = 256, 257, 258
VOCAB_SIZE = 300
CONTEXT_TOKENS = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokens_of(text: str) -> list[int]:
    """The tiny model's tokens of plain text."""
    return list(text.encode())


def write_tiny_model(folder: Path, *, add_bos_token: bool = False, tokenizer: bool = True) -> Path:
    """Fill `folder`; tokenizer=False leaves a model of token ids alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": IM_END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        settings = {"add_bos_token": add_bos_token, "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        _byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, at the byte's own value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return vocabulary
