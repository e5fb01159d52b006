"""What families make their layers of: the parts of worker_svc.layers under the names that weights have."""

from __future__ import annotations

from torch import Tensor

from worker_svc.layers.attention import (
    Attention,
    HeadSizes,
    NormedQkvRotary,
    PagedAttention,
    QkvRotary,
    ScoreRules,
)
from worker_svc.layers.feed_forward import GatedFeedForward
from worker_svc.layers.linear import LinearLoader
from worker_svc.layers.norm import AddNorm, Norm
from worker_svc.layers.rotary import build_cos_sin
from worker_svc.models.architecture import ModelContext


class Parts:
    """Makes parts of one model; tables of positions are shared by the layers that have the same."""

    def __init__(self, context: ModelContext) -> None:
        self.config = context.config
        self.operators = context.operators
        self.loader = LinearLoader(
            context.source,
            context.operators,
            dtype=context.dtype,
            device=context.device,
            policy=context.policy,
        )
        self._device = context.device
        self._eps = self.config["rms_norm_eps"]
        self._offset = self.config.get("rms_norm_offset", 0.0)
        self._tables: dict[bool, Tensor] = {}

    def norm(self, name: str) -> Norm:
        """The norm called `name`."""
        return Norm(name, self.loader, self.operators, eps=self._eps, offset=self._offset)

    def add_norm(self, name: str) -> AddNorm:
        """The norm called `name`, of a sum."""
        return AddNorm(name, self.loader, self.operators, eps=self._eps, offset=self._offset)

    def attention(
        self,
        layer: int,
        *,
        head_norms: bool = False,
        scale: float | None = None,
        soft_cap: float = 0.0,
        local_positions: bool = False,
    ) -> Attention:
        """A layer's attention, within its window. head_norms: query and key are normalised by head. scale:
        of scores, None: 1 / sqrt(head size). local_positions: by the rotary base of layers with a window.
        """
        config = self.config
        sizes = HeadSizes(
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            context=config["max_position_embeddings"],
        )
        prefix = f"model.layers.{layer}.self_attn"
        rules = ScoreRules(
            scale=sizes.head_dim**-0.5 if scale is None else scale,
            window=config["layer_windows"][layer],
            soft_cap=soft_cap,
        )
        projections: QkvRotary | NormedQkvRotary = (
            QkvRotary(prefix, self.loader, self.operators, sizes)
            if not head_norms
            else NormedQkvRotary(
                prefix, self.loader, self.operators, sizes, eps=self._eps, offset=self._offset
            )
        )
        attend = PagedAttention(prefix, self.operators, sizes, rules)
        out = self.loader.load(f"{prefix}.o_proj", f"{prefix}.o_proj")
        return Attention(projections, attend, out, self._positions(local=local_positions))

    def gated(self, block: str, *, inner: int, activation: str = "silu_mul") -> GatedFeedForward:
        """A gated feed-forward part at `block`, such as "model.layers.0.mlp"."""
        return GatedFeedForward(block, self.loader, self.operators, inner=inner, activation=activation)

    def _positions(self, *, local: bool) -> Tensor:
        if local not in self._tables:
            config = self.config
            self._tables[local] = build_cos_sin(
                head_dim=config["head_dim"],
                context=config["max_position_embeddings"],
                theta=config["rope_local_base_freq"] if local else config["rope_theta"],
                scaling=None if local else config["rope_scaling"],
                device=self._device,
            )
        return self._tables[local]


def plain_attention(parts: Parts, layer: int) -> Attention:
    """Llama's, with a window where the layer has one; biases where the weights have them."""
    return parts.attention(layer)


def normed_attention(parts: Parts, layer: int) -> Attention:
    """The same with query and key normalised by head."""
    return parts.attention(layer, head_norms=True)


def silu_feed_forward(parts: Parts, layer: int) -> GatedFeedForward:
    """Llama's."""
    return parts.gated(f"model.layers.{layer}.mlp", inner=parts.config["intermediate_size"])
