"""Llama: decoder layers of grouped-query attention with rotary positions and a gated feed-forward part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.sdk.operators import OperatorTable
from worker_svc.layers.attention import attend
from worker_svc.layers.linear import LinearLoader
from worker_svc.layers.rotary import build_cos_sin
from worker_svc.layers.step_tensors import StepTensors
from worker_svc.models.architecture import KvShape, ModelContext, Observer


class LlamaLayer:
    """One decoder layer. Query, key and value come from one product, as do gate and up."""

    def __init__(self, prefix: str, context: ModelContext, loader: LinearLoader) -> None:
        config = context.config
        self._operators = context.operators
        self._eps = config["rms_norm_eps"]
        self._heads = config["num_attention_heads"]
        self._kv_heads = config["num_key_value_heads"]
        self._head_dim = config["head_dim"]
        self._input_norm = loader.tensor(f"{prefix}.input_layernorm.weight")
        self._qkv = loader.load(*(f"{prefix}.self_attn.{part}_proj" for part in "qkv"))
        self._out = loader.load(f"{prefix}.self_attn.o_proj")
        self._post_norm = loader.tensor(f"{prefix}.post_attention_layernorm.weight")
        self._gate_up = loader.load(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
        self._down = loader.load(f"{prefix}.mlp.down_proj")
        products = (self._qkv, self._out, self._gate_up, self._down)
        self.weight_bytes = sum(product.weight_bytes for product in products)
        self.weight_bytes += self._input_norm.nbytes + self._post_norm.nbytes

    def forward(
        self, x: Tensor, residual: Tensor | None, step: StepTensors, kv_cache: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(output of the feed-forward part, residual stream before it), each [t, hidden]."""
        operators = self._operators
        if residual is None:
            residual, x = x, operators.rms_norm(x, self._input_norm, self._eps)
        else:
            x, residual = operators.add_rms_norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, step, kv_cache, cos_sin)
        x, residual = operators.add_rms_norm(x, residual, self._post_norm, self._eps)
        return self._down(operators.silu_mul(self._gate_up(x))), residual

    def _attention(self, x: Tensor, step: StepTensors, kv_cache: Tensor, cos_sin: Tensor) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        rotated = self._heads + self._kv_heads
        query, key, value = heads[:, : self._heads], heads[:, self._heads : rotated], heads[:, rotated:]
        query, key = self._operators.rotary(query, key, step.positions, cos_sin)
        attended = attend(query, key, value, kv_cache, step, self._operators)
        return self._out(attended.flatten(1))


class LlamaModel:
    """A Llama on one device."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        loader = LinearLoader(context.source, context.operators, dtype=context.dtype, device=context.device)
        self._operators: OperatorTable = context.operators
        self._eps = config["rms_norm_eps"]
        self._embedding = loader.tensor("model.embed_tokens.weight")
        count = config["num_hidden_layers"]
        self._layers: list[LlamaLayer] = []
        for index in range(count):
            context.progress(index / (count + 1))
            self._layers.append(LlamaLayer(f"model.layers.{index}", context, loader))
        context.progress(count / (count + 1))
        self._norm = loader.tensor("model.norm.weight")
        self._head = loader.load("model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")
        self._cos_sin = build_cos_sin(
            head_dim=config["head_dim"],
            context=config["max_position_embeddings"],
            theta=config["rope_theta"],
            scaling=config["rope_scaling"],
            device=context.device,
        )
        self.kv_shape = KvShape(count, config["num_key_value_heads"], config["head_dim"])
        held = self._embedding.nbytes + self._norm.nbytes + self._head.weight_bytes
        self.weight_bytes = held + sum(layer.weight_bytes for layer in self._layers)
        context.progress(1.0)

    def forward(
        self, step: StepTensors, kv_caches: Sequence[Tensor], observe: Observer | None = None
    ) -> Tensor:
        """Hidden states [t, hidden] of all tokens, the last residual added, before the final norm."""
        x, residual = self._operators.embedding(step.token_ids, self._embedding), None
        if observe is not None:
            observe("embedding", x)
        for index, (layer, kv_cache) in enumerate(zip(self._layers, kv_caches, strict=True)):
            x, residual = layer.forward(x, residual, step, kv_cache, self._cos_sin)
            if observe is not None:
                observe(f"layers.{index}", x + residual)
        return x if residual is None else x + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[r, hidden] -> [r, vocab]."""
        return self._head(self._operators.rms_norm(hidden, self._norm, self._eps))
