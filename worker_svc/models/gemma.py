"""Gemma 2 and 3 (text): norms before and behind each part, gelu, windows in most layers; in 2 soft caps, in 3
norms of query and key and a rotary base for layers with a window.
"""

from __future__ import annotations

from worker_svc.layers.attention import Attention
from worker_svc.layers.feed_forward import GatedFeedForward
from worker_svc.models.decoder import DecoderFamily
from worker_svc.models.parts import Parts


def _attention(parts: Parts, layer: int, *, head_norms: bool, local_positions: bool) -> Attention:
    config = parts.config
    return parts.attention(
        layer,
        head_norms=head_norms,
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=float(config["attn_logit_softcapping"] or 0.0),
        local_positions=local_positions,
    )


def _gemma2_attention(parts: Parts, layer: int) -> Attention:
    return _attention(parts, layer, head_norms=False, local_positions=False)


def _gemma3_attention(parts: Parts, layer: int) -> Attention:
    local = parts.config["layer_types"][layer] == "sliding_attention"
    return _attention(parts, layer, head_norms=True, local_positions=local)


def _gelu_feed_forward(parts: Parts, layer: int) -> GatedFeedForward:
    block = f"model.layers.{layer}.mlp"
    return parts.gated(block, inner=parts.config["intermediate_size"], activation="gelu_mul")


GEMMA2 = DecoderFamily(
    attention=_gemma2_attention,
    feed_forward=_gelu_feed_forward,
    feed_forward_norm="pre_feedforward_layernorm",
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    scales_embedding=True,
)
GEMMA3 = DecoderFamily(
    attention=_gemma3_attention,
    feed_forward=_gelu_feed_forward,
    feed_forward_norm=GEMMA2.feed_forward_norm,
    post_norms=GEMMA2.post_norms,
    scales_embedding=True,
)
