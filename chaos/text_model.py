"""The folder of a model with text and without weights, for what gateways check of text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT_TOKENS = 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 256,
    "max_position_embeddings": CONTEXT_TOKENS, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_text_model(folder: Path) -> Path:
    """Write config, tokenizer and template; returns `folder`."""
    folder.mkdir(exist_ok=True)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    template = json.dumps({"chat_template": CHAT_TEMPLATE})
    (folder / "tokenizer_config.json").write_text(template, encoding="utf-8")
    return folder
