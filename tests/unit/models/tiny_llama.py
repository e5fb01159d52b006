"""A model folder small enough for property tests; weights come from load-format dummy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """The folder, with `changes` to the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder
