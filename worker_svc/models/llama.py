"""Llama: decoder layers of grouped-query attention with rotary positions and a gated feed-forward part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from worker_svc.layers.attention import HeadSizes, PagedAttention, QkvRotary
from worker_svc.layers.linear import LinearLoader
from worker_svc.layers.rotary import build_cos_sin
from worker_svc.layers.step_tensors import StepTensors
from worker_svc.models.architecture import KvShape, ModelContext, Observer


class LlamaLayer:
    """One decoder layer. Query, key and value come from one product, as do gate and up."""

    def __init__(self, prefix: str, context: ModelContext, loader: LinearLoader, *, first: bool) -> None:
        """first: its input has no residual stream yet."""
        config, operators = context.config, context.operators
        hidden = config["hidden_size"]
        self._eps = config["rms_norm_eps"]
        sizes = HeadSizes(
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            context=config["max_position_embeddings"],
        )
        attention = f"{prefix}.self_attn"
        self._input_norm = loader.tensor(f"{prefix}.input_layernorm.weight")
        self._qkv = QkvRotary(attention, loader, operators, sizes)
        self._attend = PagedAttention(attention, operators, sizes)
        self._out = loader.load(f"{attention}.o_proj", f"{attention}.o_proj")
        self._post_norm = loader.tensor(f"{prefix}.post_attention_layernorm.weight")
        self._gate_up = loader.load(
            f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"
        )
        self._down = loader.load(f"{prefix}.mlp.down_proj", f"{prefix}.mlp.down_proj")
        name = "rms_norm" if first else "add_rms_norm"
        self._norm = operators.bind(name, f"{prefix}.input_layernorm", K=hidden).call
        self._add_norm = operators.bind("add_rms_norm", f"{prefix}.post_attention_layernorm", K=hidden).call
        self._gate = operators.bind("silu_mul", f"{prefix}.mlp.act", I=config["intermediate_size"]).call
        products = (self._qkv, self._out, self._gate_up, self._down)
        self.weight_bytes = sum(product.weight_bytes for product in products)
        self.weight_bytes += self._input_norm.nbytes + self._post_norm.nbytes

    def forward(
        self, x: Tensor, residual: Tensor | None, step: StepTensors, kv_cache: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(output of the feed-forward part, residual stream before it), each [t, hidden]."""
        if residual is None:
            residual, x = x, self._norm(x, self._input_norm, self._eps)
        else:
            x, residual = self._norm(x, residual, self._input_norm, self._eps)
        query, key, value = self._qkv(x, step.positions, cos_sin)
        x = self._out(self._attend(query, key, value, kv_cache, step).flatten(1))
        x, residual = self._add_norm(x, residual, self._post_norm, self._eps)
        return self._down(self._gate(self._gate_up(x))), residual


class LlamaModel:
    """A Llama on one device."""

    def __init__(self, context: ModelContext) -> None:
        config, operators = context.config, context.operators
        loader = LinearLoader(
            context.source, operators, dtype=context.dtype, device=context.device, policy=context.policy
        )
        hidden = config["hidden_size"]
        self._eps = config["rms_norm_eps"]
        self._embedding = loader.tensor("model.embed_tokens.weight")
        self._embed = operators.bind(
            "embedding", "model.embed_tokens", V=self._embedding.shape[0], K=hidden
        ).call
        count = config["num_hidden_layers"]
        self._layers: list[LlamaLayer] = []
        for index in range(count):
            context.progress(index / (count + 1))
            self._layers.append(LlamaLayer(f"model.layers.{index}", context, loader, first=index == 0))
        context.progress(count / (count + 1))
        self._norm_weight = loader.tensor("model.norm.weight")
        self._norm = operators.bind("rms_norm", "model.norm", K=hidden).call
        tied = config["tie_word_embeddings"]
        self._head = loader.load("lm_head", "model.embed_tokens" if tied else "lm_head", plain=True)
        self._cos_sin = build_cos_sin(
            head_dim=config["head_dim"],
            context=config["max_position_embeddings"],
            theta=config["rope_theta"],
            scaling=config["rope_scaling"],
            device=context.device,
        )
        self.kv_shape = KvShape(count, config["num_key_value_heads"], config["head_dim"])
        held = self._embedding.nbytes + self._norm_weight.nbytes + self._head.weight_bytes
        self.weight_bytes = held + sum(layer.weight_bytes for layer in self._layers)
        context.progress(1.0)

    def forward(
        self, step: StepTensors, kv_caches: Sequence[Tensor], observe: Observer | None = None
    ) -> Tensor:
        """Hidden states [t, hidden] of all tokens, the last residual added, before the final norm."""
        x: Tensor = self._embed(step.token_ids, self._embedding)
        residual: Tensor | None = None
        if observe is not None:
            observe("embedding", x)
        for index, (layer, kv_cache) in enumerate(zip(self._layers, kv_caches, strict=True)):
            x, residual = layer.forward(x, residual, step, kv_cache, self._cos_sin)
            if observe is not None:
                observe(f"layers.{index}", x + residual)
        return x if residual is None else x + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[r, hidden] -> [r, vocab]."""
        return self._head(self._norm(hidden, self._norm_weight, self._eps))
