"""Every family as a random model of `transformers`, small enough that a pass takes milliseconds.

Sizes are multiples of 32, so that the step kernel takes those that are of its pattern.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    # Skips whoever imports this module; nothing outside of this folder imports `transformers`.
    transformers = pytest.importorskip(
        "transformers", reason='`.venv/bin/pip install -e ".[parity]"` installs transformers'
    )

CONTEXT = 256
VOCAB = 131
_RANDOM = np.random.default_rng(11)
PROMPTS: list[list[int]] = [_RANDOM.integers(0, VOCAB, count).tolist() for count in (37, 5, 22)]
"""The first one is longer than every window here, the second shorter."""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
_MIXTURE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Variant:
    """A family with one of its switches set. by_program: the cpu plugin's step program serves it."""

    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    by_program: bool = False


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


VARIANTS: dict[str, Variant] = {
    "llama": Variant("LlamaForCausalLM", {}, by_program=True),
    "llama-biases-tied": Variant(
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        by_program=True,
    ),
    "llama-linear": Variant("LlamaForCausalLM", _rope("linear", factor=4.0), by_program=True),
    "llama-llama3": Variant(
        "LlamaForCausalLM",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        by_program=True,
    ),
    "llama-yarn": Variant(
        "LlamaForCausalLM",
        _rope("yarn", factor=4.0, original_max_position_embeddings=64),
        by_program=True,
    ),
    "mistral": Variant("MistralForCausalLM", {"sliding_window": None}, by_program=True),
    "mistral-window": Variant("MistralForCausalLM", {"sliding_window": 12}),
    "mixtral": Variant("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": Variant("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen2": Variant("Qwen2ForCausalLM", {"tie_word_embeddings": False}, by_program=True),
    "qwen2-late-window": Variant(
        "Qwen2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 10,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Variant("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-moe": Variant(
        "Qwen2MoeForCausalLM",
        {**_MIXTURE, "shared_expert_intermediate_size": 64, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    # GGUFs have experts in every layer.
    "qwen2-moe-sparse": Variant(
        "Qwen2MoeForCausalLM", {**_MIXTURE, "shared_expert_intermediate_size": 64, "norm_topk_prob": False}
    ),
    "qwen3-moe": Variant("Qwen3MoeForCausalLM", {**_MIXTURE, "norm_topk_prob": True}),
    "gemma2": Variant(
        "Gemma2ForCausalLM",
        # Low caps and a scale that is not 1 / sqrt(16), so that they bend what the tiny model makes.
        {
            "sliding_window": 11,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": Variant(
        "Gemma3ForCausalLM",
        {
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # GGUFs have neither the scale of scores nor a list of layers: they follow from the sizes.
    "gemma2-gguf": Variant("Gemma2ForCausalLM", {"sliding_window": 11, "query_pre_attn_scalar": 16}),
    "gemma3-gguf": Variant(
        "Gemma3ForCausalLM", {"sliding_window": 13, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
    ),
}


def make_model(variant: Variant, *, seed: int = 7) -> PreTrainedModel:
    """In float32 on the host, ready to be called."""
    model_class = getattr(transformers, variant.architecture)
    config = model_class.config_class(**{**_SIZES, **variant.changes})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config)
        for name, parameter in model.named_parameters():
            _spread(name, parameter, tied=bool(config.tie_word_embeddings))
    made: PreTrainedModel = model.float().eval()
    return made


@torch.no_grad()
def _spread(name: str, parameter: Tensor, *, tied: bool) -> None:
    """Values far from what a fresh model has: nothing cancels, norms and biases count, logits lie apart.

    Where the embedding is tied, a token's own row must not outweigh what the layers make of it: rows are
    small, and the last norm turns the signs of half of the numbers.
    """
    if tied and name == "model.norm.weight":
        # 1 or, in Gemma, 0 before: what the norm multiplies by has its mean at 0.
        parameter += torch.randn_like(parameter) - 1
        return
    if name.endswith("norm.weight"):
        parameter += torch.randn_like(parameter) * 0.3
    elif parameter.ndim == 1:
        parameter.copy_(torch.randn_like(parameter) * 0.4)
    elif "embed_tokens" in name:
        parameter.copy_(torch.randn_like(parameter) * (0.1 if tied else 1.0))
    else:
        parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """As a folder of several safetensors files with their index."""
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder
