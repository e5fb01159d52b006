"""Mixtures of experts: Mixtral, Qwen2-MoE (with an expert for all tokens) and Qwen3-MoE."""

from __future__ import annotations

from worker_svc.layers.experts import Choice, ExpertNames, Experts, SharedExperts
from worker_svc.layers.feed_forward import GatedFeedForward
from worker_svc.models.decoder import DecoderFamily
from worker_svc.models.parts import Parts, normed_attention, silu_feed_forward


def _mixtral_experts(parts: Parts, layer: int) -> Experts:
    config = parts.config
    block = f"model.layers.{layer}.block_sparse_moe"

    def of_expert(expert: int) -> tuple[str, str, str]:
        name = f"{block}.experts.{expert}"
        return f"{name}.w1", f"{name}.w3", f"{name}.w2"

    choice = Choice(config["num_local_experts"], config["num_experts_per_tok"], renormalize=True)
    names = ExpertNames(f"{block}.gate", of_expert)
    return parts.experts(block, names, choice)


def _qwen_experts(parts: Parts, layer: int) -> Experts | GatedFeedForward:
    """Some layers may be dense."""
    config = parts.config
    if not config["expert_layers"][layer]:
        return silu_feed_forward(parts, layer)
    block = f"model.layers.{layer}.mlp"

    def of_expert(expert: int) -> tuple[str, str, str]:
        name = f"{block}.experts.{expert}"
        return f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"

    choice = Choice(
        config["num_experts"], config["num_experts_per_tok"], renormalize=bool(config["norm_topk_prob"])
    )
    names = ExpertNames(f"{block}.gate", of_expert)
    return parts.experts(block, names, choice)


def _qwen2_experts(parts: Parts, layer: int) -> SharedExperts | Experts | GatedFeedForward:
    routed = _qwen_experts(parts, layer)
    if not isinstance(routed, Experts):
        return routed
    block = f"model.layers.{layer}.mlp"
    inner = parts.config["shared_expert_intermediate_size"]
    shared = parts.gated(f"{block}.shared_expert", inner=inner)
    return SharedExperts(routed, shared, f"{block}.shared_expert_gate", parts.loader)


MIXTRAL = DecoderFamily(feed_forward=_mixtral_experts)
QWEN2_MOE = DecoderFamily(feed_forward=_qwen2_experts)
QWEN3_MOE = DecoderFamily(attention=normed_attention, feed_forward=_qwen_experts)
