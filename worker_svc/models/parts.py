"""What families make their layers of: the parts of worker_svc.layers under the names that weights have."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshkit.modelstore.sharding import local_sizes
from worker_svc.layers.attention import (
    Attention,
    HeadSizes,
    NormedQkvRotary,
    PagedAttention,
    QkvRotary,
    ScoreRules,
)
from worker_svc.layers.embedding import Embedding
from worker_svc.layers.experts import Choice, ExpertNames, Experts
from worker_svc.layers.feed_forward import GatedFeedForward
from worker_svc.layers.linear import LinearLoader
from worker_svc.layers.norm import AddNorm, Norm
from worker_svc.layers.rotary import build_cos_sin
from worker_svc.models.architecture import ModelContext
from worker_svc.parallel.split import RowPart, SplitEmbedding, SplitHead, Summed


class Parts:
    """Makes parts of one model, or of what one rank has of it: families name sizes of the whole model, and
    this class alone knows a rank's. Tables of positions are shared by the layers that have the same.
    """

    def __init__(self, context: ModelContext) -> None:
        self.config = context.config
        self.operators = context.operators
        self._links = context.links
        self._kv_scales = context.kv_scales
        self._ranks = context.links.place.layout.tensor
        self.sizes = local_sizes(context.config, context.links.place)
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
            heads=self.sizes.heads,
            kv_heads=self.sizes.kv_heads,
            head_dim=config["head_dim"],
            context=config["max_position_embeddings"],
        )
        prefix = f"model.layers.{layer}.self_attn"
        rules = ScoreRules(
            scale=sizes.head_dim**-0.5 if scale is None else scale,
            window=config["layer_windows"][layer],
            soft_cap=soft_cap,
            cell_scales=self._kv_scales.of(layer),
        )
        projections: QkvRotary | NormedQkvRotary = (
            QkvRotary(prefix, self.loader, self.operators, sizes)
            if not head_norms
            else NormedQkvRotary(
                prefix, self.loader, self.operators, sizes, eps=self._eps, offset=self._offset
            )
        )
        attend = PagedAttention(prefix, self.operators, sizes, rules)
        out = self.summed(self.loader.load(f"{prefix}.o_proj", f"{prefix}.o_proj"))
        return Attention(projections, attend, out, self._positions(local=local_positions))

    def gated(self, block: str, *, inner: int, activation: str = "silu_mul") -> GatedFeedForward:
        """A gated feed-forward part at `block`, such as "model.layers.0.mlp". inner: of the whole model."""
        inner //= self._ranks
        return GatedFeedForward(block, self.loader, self.operators, inner=inner, activation=activation)

    def experts(self, block: str, names: ExpertNames, choice: Choice) -> Experts:
        """Routed experts at `block`, of which a rank holds some."""
        held = self._links.place.experts(choice.count)
        return Experts(block, names, choice, self.loader, self.operators, held=held)

    def summed(self, part: RowPart) -> RowPart:
        """The whole layer's result, of a part of it."""
        return Summed(part, self._links) if self._ranks > 1 else part

    def embedding(self, name: str) -> tuple[Callable[[Tensor], Tensor], int]:
        """(int64 [t] -> rows [t, hidden] of the table called `name`, bytes that it holds)."""
        table = Embedding(name, self.loader, self.operators)
        whole = SplitEmbedding(table, table.rows, self._links) if self._ranks > 1 else table
        return whole, table.weight_bytes

    def head(self, name: str) -> RowPart:
        """Hidden states [r, hidden] -> logits [r, vocab] by the matrix called `name`."""
        head = self.loader.load("lm_head", name, plain=True)
        if self._ranks == 1:
            return head
        return SplitHead(head, self.config["vocab_size"], self._links)

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
