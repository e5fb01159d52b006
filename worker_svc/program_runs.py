"""Whole steps on a plugin's step program: the model described for it, and a step's rows as its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plugins.sdk.runner import AllowedTokens, FloatArray, IntArray, StepBatch, StepOutput
from plugins.sdk.slot_sampling import Sampled, SlotSampling
from plugins.sdk.step_program import (
    LLAMA,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    ProgramInputs,
    StepProgram,
    StoredMatrix,
)
from worker_svc.layers.rotary import build_cos_sin
from worker_svc.layers.step_tensors import Int64Array, sampling_rows
from worker_svc.models.architecture import KvShape
from worker_svc.weights import WeightReader, WeightSource

_PATTERNS = {"LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA, "Qwen2ForCausalLM": LLAMA}
"""Architectures of worker_svc.models whose layers are of a pattern that step programs know, where attention
reaches back all the way.
"""
_HOST = torch.device("cpu")


def describe_shape(architecture: str, config: Mapping[str, Any], *, vocab_size: int) -> DecoderShape | None:
    """The model's sizes, where it is of a known pattern."""
    pattern = _PATTERNS.get(architecture)
    if pattern is None or any(config.get("layer_windows", ())):
        return None
    return DecoderShape(
        pattern=pattern,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=vocab_size,
        context_tokens=config["max_position_embeddings"],
        eps=config["rms_norm_eps"],
        scale=config["head_dim"] ** -0.5,
    )


def kv_shape_of(shape: DecoderShape | None) -> KvShape:
    """What a program's cache holds for a token."""
    if shape is None:
        raise ValueError("a program runs a model of a known shape")
    return KvShape(shape.layers, shape.kv_heads, shape.head_dim)


class DecoderReader:
    """Reads a model's weights for a program: as stored where it takes their encoding, else as float32."""

    def __init__(
        self,
        source: WeightSource,
        config: Mapping[str, Any],
        *,
        encodings: Sequence[str],
        progress: Callable[[float], None],
    ) -> None:
        """progress: called with the share of weights read, in [0, 1]."""
        self._source = source
        self._config = config
        self._encodings = frozenset(encodings)
        self._progress = progress
        self._names = frozenset(source.names())

    def read(self) -> DecoderWeights:
        """All of them; layers are read as they are asked for."""
        config = self._config
        table = build_cos_sin(
            head_dim=config["head_dim"],
            context=config["max_position_embeddings"],
            theta=config["rope_theta"],
            scaling=config["rope_scaling"],
            device=_HOST,
        )
        tied = config["tie_word_embeddings"]
        return DecoderWeights(
            embedding=self._matrix("model.embed_tokens"),
            layers=self._layers(),
            final_norm=self._vector("model.norm.weight"),
            head=self._matrix("model.embed_tokens" if tied else "lm_head"),
            cos_sin=table.numpy(),
        )

    def _layers(self) -> Iterator[DecoderLayer]:
        count = self._config["num_hidden_layers"]
        for index in range(count):
            self._progress(index / count)
            prefix = f"model.layers.{index}"
            yield DecoderLayer(
                input_norm=self._vector(f"{prefix}.input_layernorm.weight"),
                query=self._matrix(f"{prefix}.self_attn.q_proj"),
                key=self._matrix(f"{prefix}.self_attn.k_proj"),
                value=self._matrix(f"{prefix}.self_attn.v_proj"),
                out=self._matrix(f"{prefix}.self_attn.o_proj"),
                post_norm=self._vector(f"{prefix}.post_attention_layernorm.weight"),
                gate=self._matrix(f"{prefix}.mlp.gate_proj"),
                up=self._matrix(f"{prefix}.mlp.up_proj"),
                down=self._matrix(f"{prefix}.mlp.down_proj"),
            )
        self._progress(1.0)

    def _matrix(self, name: str) -> StoredMatrix:
        weight, source = f"{name}.weight", self._source
        bias = self._vector(f"{name}.bias") if f"{name}.bias" in self._names else None
        inner = source.shape(weight)[1]
        if isinstance(source, WeightReader) and source.encoding(weight) in self._encodings:
            return StoredMatrix(source.encoding(weight), source.raw_rows(weight).numpy(), inner, bias)
        values = source.read(weight, torch.float32).numpy()
        return StoredMatrix("F32", values.view(np.uint8), inner, bias)

    def _vector(self, name: str) -> FloatArray:
        values: FloatArray = self._source.read(name, torch.float32).numpy()
        return values


def run_batch(
    batch: StepBatch,
    program: StepProgram,
    sampling: SlotSampling,
    sample: Callable[[FloatArray, IntArray, AllowedTokens | None], Sampled],
    *,
    page_size: int,
) -> StepOutput:
    """One forward pass and its tokens: by the program where it can, else by `sample` (logits, slots,
    what they may take).
    """
    rows, slots = sampling_rows(batch)
    inputs = _gather_inputs(batch, sampling, rows, slots, page_size)
    outputs = program.run(inputs)
    if not len(slots):
        return StepOutput(slots=np.empty(0, dtype=np.int32), token_ids=np.empty(0, dtype=np.int32))
    if outputs.token_ids is not None:
        sampled = sampling.take(slots, outputs.token_ids)
    else:
        sampled = sample(outputs.logits, slots, batch.allowed)
    return StepOutput(sampled.slots, sampled.token_ids, sampled.logprobs, sampled.failures)


def _gather_inputs(
    batch: StepBatch, sampling: SlotSampling, sampled_rows: Int64Array, slots: IntArray, page_size: int
) -> ProgramInputs:
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    counts: list[int] = []
    tables: list[IntArray] = []
    if batch.decode is not None:
        decode = batch.decode
        tokens.append(sampling.last_tokens[decode.slots].astype(np.int32))
        positions.append(decode.positions)
        counts += [1] * len(decode.slots)
        tables.append(decode.page_table[:, : int(decode.positions.max()) // page_size + 1])
    for row in batch.prefill:
        count = len(row.token_ids)
        tokens.append(row.token_ids)
        positions.append(np.arange(row.start, row.start + count, dtype=np.int32))
        counts.append(count)
        tables.append(row.page_ids[None, : (row.start + count - 1) // page_size + 1])
    return ProgramInputs(
        token_ids=_joined(tokens),
        positions=_joined(positions),
        sequences=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        tables=_stack_tables(tables),
        sampled_rows=sampled_rows.astype(np.int32),
        sampled_slots=slots,
        draws=sampling.draws(slots) if len(slots) else None,
        allowed=batch.allowed if len(slots) else None,
    )


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _stack_tables(tables: Sequence[IntArray]) -> IntArray:
    """One table as wide as the widest; what is behind a row's own pages is 0 and never read."""
    if len(tables) == 1:
        return tables[0]
    stacked = np.zeros((sum(map(len, tables)), max(table.shape[1] for table in tables)), dtype=np.int32)
    first = 0
    for table in tables:
        stacked[first : first + len(table), : table.shape[1]] = table
        first += len(table)
    return stacked


def probe_is_finite(program: StepProgram, tokens: IntArray) -> bool:
    """Whether a prompt of `tokens` on page 0 gives finite logits."""
    count = len(tokens)
    outputs = program.run(
        ProgramInputs(
            token_ids=tokens,
            positions=np.arange(count, dtype=np.int32),
            sequences=np.zeros(count, dtype=np.int32),
            tables=np.zeros((1, 1), dtype=np.int32),
            sampled_rows=np.array([count - 1], dtype=np.int32),
            sampled_slots=np.zeros(1, dtype=np.int32),
            draws=None,
        )
    )
    return bool(np.isfinite(outputs.logits).all())
