"""Step programs: a plugin takes over whole forward passes of models whose pattern of layers it knows.

The capability report says which patterns; the plan decides once per loaded model. A model of no known
pattern, and every model on a plugin without programs, runs by operators. No torch.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plugins.sdk.runner import AllowedTokens, FloatArray, IntArray
from plugins.sdk.timing import StopTiming

LLAMA = "llama"
"""Decoder layers of rms_norm, grouped-query attention with rotary positions over all of a head, add_rms_norm,
and a feed-forward part gated by silu; an embedding before, rms_norm and a head behind.
"""

PATTERNS = (LLAMA,)
A8 = "a8"
"""Products of weights in blocks of 4 or 8 bits with rows in int8: each 32 inner values of a row rounded to
nearest, halves to even, by a scale of their own, their largest magnitude / 127. Sums of a block are exact,
those over blocks float32. Products with other weights, and all else, as without.
"""
PROGRAM_QUANTIZATIONS = (A8,)
"""Values of `quantization` that step programs alone offer: no operator has such numbers."""
SYMBOLS = frozenset("KIHGDVL")
"""What constraints of step programs may name, see `DecoderShape.symbols`."""

BytesArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a model of a pattern. `scale`: what scores of attention are multiplied by."""

    pattern: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    eps: float
    scale: float

    def symbols(self) -> dict[str, int]:
        """What constraints may name, by letter."""
        return {
            "K": self.hidden,
            "I": self.inner,
            "H": self.heads,
            "G": self.kv_heads,
            "D": self.head_dim,
            "V": self.vocab_size,
            "L": self.layers,
        }


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight [outputs, inner] as it is stored.

    encoding: F32, BF16, F16 or a block format of GGUF by its name there. rows: uint8 [outputs, bytes of a
    row], rows in Hugging Face's rotary order. bias: float32 [outputs] or None.
    """

    encoding: str
    rows: BytesArray
    inner: int
    bias: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; norms are float32 [hidden]."""

    input_norm: FloatArray
    query: StoredMatrix
    key: StoredMatrix
    value: StoredMatrix
    out: StoredMatrix
    post_norm: FloatArray
    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of a model. layers: read one at a time, once, in order; the plugin keeps what it makes of each.

    cos_sin: float32 [context, head_dim], cosines first, of every position's angles.
    """

    embedding: StoredMatrix
    layers: Iterable[DecoderLayer]
    final_norm: FloatArray
    head: StoredMatrix
    cos_sin: FloatArray


@dataclass(frozen=True)
class StepProgramCapability:
    """A pattern whose forward passes the plugin takes over.

    dtypes, kv_cache_dtypes: those that it computes and caches in. encodings: weights that it uses as stored;
    others are decoded to F32 first. constraints: as of operators, by `DecoderShape.symbols`. kv_layout: how
    its pages lie in memory. implementation: for people. reason: why no program runs here, "" where one does.
    quantizations: "" for weights as they are, and those of PROGRAM_QUANTIZATIONS that it can.
    """

    pattern: str
    dtypes: Sequence[str] = ()
    kv_cache_dtypes: Sequence[str] = ()
    encodings: Sequence[str] = ("F32",)
    constraints: Sequence[str] = ()
    kv_layout: str = ""
    implementation: str = ""
    reason: str = ""
    quantizations: Sequence[str] = ("",)


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Effective settings of all slots: arrays [slots] that stay where they are and change between steps.

    Ranges as in SamplingSettings. temperature 0: the largest logit. output_index: index of the next draw.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint64]
    output_index: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """One forward pass of t tokens of s sequences, r of which get logits. Arrays are int32.

    token_ids, positions, sequences [t]: `sequences` is each token's row of `tables`. tables [s, width]:
    pages, good up to each sequence's last position. Tokens of one sequence follow each other in order of
    position. sampled_rows, sampled_slots [r]: index among the tokens, and slot in `draws`. draws: None where
    the caller samples by itself. allowed: where given, rows that draws may give a token of theirs only; the
    same tokens come out as with the logits of all others at minus infinity.
    """

    token_ids: IntArray
    positions: IntArray
    sequences: IntArray
    tables: IntArray
    sampled_rows: IntArray
    sampled_slots: IntArray
    draws: DrawSettings | None
    allowed: AllowedTokens | None = None


@dataclass(frozen=True, slots=True)
class ProgramOutputs:
    """logits: float32 [r, vocab], good until the next `run`. token_ids: int32 [r] where draws were given, -1
    for a row with a logit that is not finite.
    """

    logits: FloatArray
    token_ids: IntArray | None


class StepProgram(abc.ABC):
    """One model, ready to run; called on the device thread.

    A row's result MUST depend on nothing but its own sequence.
    """

    @property
    @abc.abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of all weights as held."""

    @abc.abstractmethod
    def attach_cache(self, cache: Any, *, page_count: int, page_size: int) -> None:
        """The pages of all layers from now on: a zeroed tensor of the plugin's memory manager. The order of
        numbers in it is the program's own.
        """

    @abc.abstractmethod
    def run(self, inputs: ProgramInputs) -> ProgramOutputs:
        """One forward pass: writes the cache. Raises MemoryError where there is none left for a step."""

    def start_timing(self, *, most_runs: int) -> StopTiming | None:
        """Time what steps consist of, from the next `run` on, without changing what they make; None: it
        cannot.

        most_runs: runs that are told one by one; of all others the sums.
        """
        del most_runs
        return None
