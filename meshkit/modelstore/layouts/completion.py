"""Fills in and checks what configurations of all families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshkit.modelstore.checkpoint_quantization import read_quantization
from meshkit.modelstore.layouts.family import FamilyLayout
from meshkit.modelstore.problems import model_path_error

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rms_norm_offset": 0.0,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def complete(document: Mapping[str, Any], family: FamilyLayout, *, source: str) -> dict[str, Any]:
    """See `complete_config`."""
    _check_supported(document, family, source=source)
    config = {**_DEFAULTS, **family.defaults, **document}
    for field in _REQUIRED:
        _check_size(field, config.get(field), source=source)
    family.prepare(config)
    for field in family.sizes:
        _check_size(field, config.get(field), source=source)
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for field in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        _check_size(field, config[field], source=source)
    _check_multiple(config, "num_attention_heads", "num_key_value_heads", source=source)
    if "expert_layers" in config:
        _check_choice(config, source=source)
    _complete_rope(config, document, source=source)
    config["layer_types"] = _layer_types(config, family, source=source)
    config["layer_windows"] = _layer_windows(config, source=source)
    return config


def _check_supported(document: Mapping[str, Any], family: FamilyLayout, *, source: str) -> None:
    for field in ("hidden_act", "hidden_activation"):
        # Gemma's older configurations have both, and only the second one counts.
        if field == "hidden_act" and document.get("hidden_activation"):
            continue
        if (named := document.get(field) or family.activation) != family.activation:
            raise model_path_error(
                f"{field} {named!r} of {source} is not supported; supported: {family.activation}",
                reason="ARCHITECTURE_UNSUPPORTED",
            )
    read_quantization(document, source=source)
    if document.get("use_bidirectional_attention"):
        raise model_path_error(
            f"use_bidirectional_attention of {source} is set: tokens would see later ones; only causal "
            "attention is supported",
            reason="ARCHITECTURE_UNSUPPORTED",
        )


def _check_size(field: str, value: object, *, source: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise model_path_error(
            f"{field} of {source} has to be a positive integer, not {value!r}", reason="CONFIG_DAMAGED"
        )


def _check_multiple(config: Mapping[str, Any], field: str, divisor: str, *, source: str) -> None:
    if config[field] % config[divisor]:
        raise model_path_error(
            f"{field} {config[field]} of {source} is no multiple of {divisor} {config[divisor]}",
            reason="CONFIG_DAMAGED",
        )


def _check_choice(config: Mapping[str, Any], *, source: str) -> None:
    experts = config.get("num_experts") or config["num_local_experts"]
    if config["num_experts_per_tok"] > experts:
        raise model_path_error(
            f"num_experts_per_tok {config['num_experts_per_tok']} of {source} is more than its experts, "
            f"{experts}",
            reason="CONFIG_DAMAGED",
        )


def _complete_rope(config: dict[str, Any], document: Mapping[str, Any], *, source: str) -> None:
    """transformers 5 writes rope_parameters where 4 wrote rope_theta and rope_scaling; by kind of layer where
    kinds differ, for which 4 wrote rope_local_base_freq.
    """
    parameters = document.get("rope_parameters") or {}
    if _SLIDING in parameters or _FULL in parameters:
        local = parameters.get(_SLIDING) or {}
        parameters = parameters.get(_FULL) or {}
        if local.get("rope_type", "default") != "default":
            raise model_path_error(
                f"rope_parameters of {source} scale layers of {_SLIDING}: {local['rope_type']!r}; supported "
                f"is a scaling of {_FULL} alone",
                reason="ARCHITECTURE_UNSUPPORTED",
            )
        if "rope_theta" in local:
            config["rope_local_base_freq"] = local["rope_theta"]
    if "rope_theta" in parameters and "rope_theta" not in document:
        config["rope_theta"] = parameters["rope_theta"]
    if config["rope_scaling"] is None and parameters.get("rope_type", "default") != "default":
        config["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise model_path_error(
            f"partial_rotary_factor of {source} is {share}; supported: rotary positions over all of a head",
            reason="ARCHITECTURE_UNSUPPORTED",
        )


def _layer_types(config: Mapping[str, Any], family: FamilyLayout, *, source: str) -> list[str]:
    kinds = config.get("layer_types") or family.layer_types(config)
    strange = sorted(set(kinds) - {_FULL, _SLIDING})
    if strange or len(kinds) != config["num_hidden_layers"]:
        named = ", ".join(strange or sorted(set(kinds)))
        raise model_path_error(
            f"layer_types of {source} lists {len(kinds)} layers of {named}; supported: one of {_FULL} and "
            f"{_SLIDING} for each of {config['num_hidden_layers']}",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    return list(kinds)


def _layer_windows(config: Mapping[str, Any], *, source: str) -> list[int]:
    kinds = config["layer_types"]
    if _SLIDING not in kinds:
        return [0] * len(kinds)
    window = config["sliding_window"]
    _check_size("sliding_window", window, source=source)
    # A window that no sequence outgrows is none: such a layer is an ordinary one.
    active = window if window < config["max_position_embeddings"] else 0
    return [active if kind == _SLIDING else 0 for kind in kinds]
