"""What a LlamaForCausalLM configuration means: its defaults, its tensors and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshkit.modelstore.problems import model_path_error

SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM",)

# What Hugging Face takes for a field that a Llama config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
}
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def complete_config(document: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The configuration with every field that the executor reads filled in.

    Raises:
        InvalidArgument: (model_path) an architecture, activation or quantisation that we do not run, or a
        size that is
            missing or not a positive integer.
    """
    _check_supported(document, source=source)
    config = {**_DEFAULTS, **document}
    for field in _REQUIRED:
        _check_size(field, document.get(field), source=source)
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for field in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        _check_size(field, config[field], source=source)
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise model_path_error(
            f"num_attention_heads {config['num_attention_heads']} of {source} is no multiple of "
            f"num_key_value_heads {config['num_key_value_heads']}",
            reason="CONFIG_DAMAGED",
        )
    _complete_rope(config)
    return config


def _check_supported(document: Mapping[str, Any], *, source: str) -> None:
    architectures = document.get("architectures") or []
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        named = ", ".join(map(str, architectures)) or "none"
        raise model_path_error(
            f"{source} names architecture {named}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    if document.get("hidden_act", "silu") != "silu":
        raise model_path_error(
            f"hidden_act {document['hidden_act']!r} of {source} is not supported; supported: silu",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    quantization = document.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        )
        raise model_path_error(
            f"quantization_config {method!r} of {source} is not supported; take unquantised safetensors "
            "or a GGUF",
            reason="QUANTIZATION_UNSUPPORTED",
        )


def _check_size(field: str, value: object, *, source: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise model_path_error(
            f"{field} of {source} has to be a positive integer, not {value!r}", reason="CONFIG_DAMAGED"
        )


def _complete_rope(config: dict[str, Any]) -> None:
    # transformers 5 writes rope_parameters where 4 wrote rope_theta and rope_scaling.
    parameters = config.get("rope_parameters") or {}
    config.setdefault("rope_theta", parameters.get("rope_theta", 10000.0))
    if config["rope_scaling"] is None and parameters.get("rope_type", "default") != "default":
        config["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a completed Llama `config` needs, in model order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biased = [(part, config["attention_bias"]) for part in ("q", "k", "v", "o")]
    biased += [(part, config["mlp_bias"]) for part in ("gate", "up", "down")]
    for part, has_bias in biased:
        block = "self_attn" if len(part) == 1 else "mlp"
        if has_bias:
            shapes[f"{block}.{part}_proj.bias"] = shapes[f"{block}.{part}_proj.weight"][:1]
    return shapes
