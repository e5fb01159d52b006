"""The decoder that all families share; what sets one apart is data: which parts its layers are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.layers.norm import AddNorm, Norm
from worker_svc.layers.step_tensors import StepTensors
from worker_svc.models.architecture import KvShape, ModelContext, Observer
from worker_svc.models.parts import Parts, plain_attention, silu_feed_forward
from worker_svc.parallel.split import RowPart


class _Attention(Protocol):
    weight_bytes: int

    def __call__(self, x: Tensor, step: StepTensors, kv_cache: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DecoderFamily:
    """What a family's layers are made of.

    attention, feed_forward: make the part of a layer by its number. feed_forward_norm: the norm before the
    second part. post_norms: norms behind the first part and behind the second, None: none. scales_embedding:
    rows of the embedding are multiplied by the root of the hidden size.
    """

    attention: Callable[[Parts, int], _Attention] = plain_attention
    feed_forward: Callable[[Parts, int], RowPart] = silu_feed_forward
    feed_forward_norm: str = "post_attention_layernorm"
    post_norms: tuple[str, str] | None = None
    scales_embedding: bool = False


class DecoderLayer:
    """Attention and a feed-forward part, each on a norm of the residual stream."""

    def __init__(self, family: DecoderFamily, parts: Parts, index: int) -> None:
        prefix = f"model.layers.{index}"
        # The first layer's input has no residual stream yet.
        self._first_norm = parts.norm(f"{prefix}.input_layernorm") if index == 0 else None
        self._input_norm = parts.add_norm(f"{prefix}.input_layernorm") if index else None
        self._attention = family.attention(parts, index)
        self._inner_norm = parts.add_norm(f"{prefix}.{family.feed_forward_norm}")
        self._feed_forward = parts.summed(family.feed_forward(parts, index))
        self._post_norms: list[Norm] = [parts.norm(f"{prefix}.{name}") for name in family.post_norms or ()]
        norms: list[Norm | AddNorm | None] = [self._first_norm, self._input_norm, self._inner_norm]
        held = [*(norm for norm in (*norms, *self._post_norms) if norm), self._attention, self._feed_forward]
        self.weight_bytes = sum(part.weight_bytes for part in held)

    def forward(
        self, x: Tensor, residual: Tensor | None, step: StepTensors, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(output of the feed-forward part, residual stream before it), each [t, hidden]."""
        if residual is None:
            assert self._first_norm is not None
            residual, x = x, self._first_norm(x)
        else:
            assert self._input_norm is not None
            x, residual = self._input_norm(x, residual)
        x = self._attention(x, step, kv_cache)
        if self._post_norms:
            x = self._post_norms[0](x)
        x, residual = self._inner_norm(x, residual)
        x = self._feed_forward(x)
        return self._post_norms[1](x) if self._post_norms else x, residual


class Decoder:
    """A model of a family on one device, or one rank's part of it: the layers of its stage, the embedding
    before the first and the head behind the last.
    """

    def __init__(self, context: ModelContext, family: DecoderFamily) -> None:
        config, place = context.config, context.links.place
        parts = Parts(context)
        self._links = context.links
        self._hidden, self._dtype = config["hidden_size"], context.dtype
        self._factor = _rounded(self._hidden**0.5, context.dtype) if family.scales_embedding else 1.0
        self.has_head = place.is_last_stage
        self.weight_bytes = 0
        if place.is_first_stage:
            self._embed, self.weight_bytes = parts.embedding("model.embed_tokens")
        held = place.layers(config["num_hidden_layers"])
        self._layers: dict[int, DecoderLayer] = {}
        for done, index in enumerate(held):
            context.progress(done / (len(held) + 1))
            self._layers[index] = DecoderLayer(family, parts, index)
        context.progress(len(held) / (len(held) + 1))
        if self.has_head:
            self._norm = parts.norm("model.norm")
            self._head = parts.head("model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")
            self.weight_bytes += self._norm.weight_bytes + self._head.weight_bytes
        self._soft_cap = float(config.get("final_logit_softcapping") or 0.0)
        self.kv_shape = KvShape(len(held), parts.sizes.kv_heads, config["head_dim"])
        self.weight_bytes += sum(layer.weight_bytes for layer in self._layers.values())
        context.progress(1.0)

    def forward(
        self, step: StepTensors, kv_caches: Sequence[Tensor], observe: Observer | None = None
    ) -> Tensor:
        """Hidden states [t, hidden] of all tokens, the last residual added, before the final norm."""
        x, residual = self._enter(step, observe)
        for (index, layer), kv_cache in zip(self._layers.items(), kv_caches, strict=True):
            x, residual = layer.forward(x, residual, step, kv_cache)
            if observe is not None:
                observe(f"layers.{index}", x + residual)
        if not self.has_head:
            # Not their sum: the next stage's first layer adds them with the very operator that it would use
            # alone, so that no bit depends on stages.
            assert residual is not None, "a stage has a layer"
            self._links.send(torch.stack((x, residual)))
            return x
        return x if residual is None else x + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[r, hidden] -> [r, vocab]."""
        logits = self._head(self._norm(hidden))
        return (logits / self._soft_cap).tanh() * self._soft_cap if self._soft_cap else logits

    def _enter(self, step: StepTensors, observe: Observer | None) -> tuple[Tensor, Tensor | None]:
        """(x, residual stream): from the embedding, or from the stage before."""
        if not self._links.place.is_first_stage:
            shape = (2, step.token_ids.shape[0], self._hidden)
            like = torch.empty(shape, dtype=self._dtype, device=step.token_ids.device)
            x, residual = self._links.receive(like).unbind()
            return x, residual
        x = self._embed(step.token_ids)
        if self._factor != 1.0:
            x = x * self._factor
        if observe is not None:
            observe("embedding", x)
        return x, None


def _rounded(value: float, dtype: torch.dtype) -> float:
    """As a tensor of the dtype would hold it: the families' own code multiplies by one."""
    return float(torch.tensor(value, dtype=dtype))
