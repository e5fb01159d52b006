"""The step contract between the executor's shell and whatever runs a model: plain numpy arrays, no torch.

The shell owns slots and page tables and applies step plans to them; a runner owns weights, KV pages, sampling
state and the last token of each slot. Every method is called on the one thread that owns the device, in plan
order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from meshkit.constraints.form import Constraint
from plugins.sdk.timing import StopTiming

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
WordArray = npt.NDArray[np.uint32]
Progress = Callable[[str, float], None]
"""Called with a stage name for people and a fraction in [0, 1]."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Effective sampling parameters of one request; ranges as in device.v1alpha1.SamplingParameters."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    choice: int
    logit_bias: Mapping[int, float]
    logprobs: bool
    suppressed_token_ids: Sequence[int]
    min_tokens: int
    constraint: Constraint | None = None
    """The shell follows it, and each step tells by `StepBatch.allowed` what it leaves: a runner need not look
    at it.
    """

    @property
    def needs_history(self) -> bool:
        """Whether a penalty reads the tokens themselves."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class SlotAdmission:
    """A request enters a slot."""

    slot: int
    sampling: SamplingSettings
    output_count: int
    """Output tokens so far: the index of the next draw."""
    cached_tokens: int
    """Tokens whose keys and values are in the first pages of the slot's table already."""
    prompt_token_ids: Sequence[int]
    """Only where `sampling.needs_history`, else empty."""
    output_token_ids: Sequence[int]
    """Only where `sampling.needs_history` or there is a constraint, else empty."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A run of known tokens of one slot: positions `start` to `start + len(token_ids) - 1`."""

    slot: int
    start: int
    token_ids: IntArray
    """Shape [n], n >= 1."""
    page_ids: IntArray
    """The slot's page table, shape [pages], covering every position of the run."""
    samples: bool
    """The last chunk: a token is sampled from the last position's logits."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token for each decoding slot, in ascending order; the runner has the last tokens."""

    slots: IntArray
    """Shape [b]."""
    positions: IntArray
    """Shape [b]: position of the input token, whose keys and values are written by this step."""
    page_table: IntArray
    """Shape [b, max_pages]; row i is valid up to `positions[i] // page_size` inclusive, no further."""


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """What the rows that sample may take, in their order: decode rows, then sampling prefill rows."""

    rows: IntArray
    """Shape [r]: the row's index in `words`, or -1 where it may take every token."""
    words: WordArray
    """Shape [m, vocab / 32, rounded up]: token i is allowed where bit i % 32 of word i // 32 is set; at least
    one is.
    """


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass: decode rows first, then prefill rows.

    allowed: None where every row may take every token; always so where the runner does not take constraints.
    """

    decode: DecodeRows | None
    prefill: Sequence[PrefillRow]
    allowed: AllowedTokens | None = None


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A slot that could not sample; others are not affected. `reason` is UPPER_SNAKE."""

    slot: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens sampled: decode rows in order, then sampling prefill rows in order, less the failed ones."""

    slots: IntArray
    token_ids: IntArray
    logprobs: FloatArray | None = None
    """Shape as `token_ids`, where any slot asked for log-probabilities."""
    failures: Sequence[RowFailure] = ()


@dataclass(frozen=True, slots=True)
class OperatorDecision:
    """One line of the execution plan: `choice` is native, fused, padded, decomposed or reference.

    where: places of the model, layer numbers as *. calls: how many of them.
    sizes: by the catalogue's symbols.
    padded: sizes after padding. parts: decisions of a decomposed operator's parts.
    """

    name: str
    choice: str
    reason: str
    where: str = ""
    calls: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)
    parts: Sequence[OperatorDecision] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a runner says of the model that it loaded. Mirrors LoadedModel of the step protocol."""

    architecture: str
    vocab_size: int
    context_tokens: int
    kv_bytes_per_token: int
    weight_bytes: int
    weights_version: str
    numeric_class: str
    kv_cache_dtype: str
    kv_layout: str
    eos_token_ids: Sequence[int] = ()
    tokenizer_file: str = ""
    """tokenizer.json of the model, "" where it has none: what constraints are followed by."""
    operators: Sequence[OperatorDecision] = field(default=())


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """This process' place in a set of ranks that run one model together, and where they meet.

    rank: from 0, stage by stage (meshkit.modelstore.sharding). tensor, pipeline: sizes of the layout.
    rendezvous: "tcp://HOST:PORT", held by rank 0. join_timeout_s: until all ranks must have come, weights
    read. step_timeout_s: for each collective of a step; a rank that does not come by then is named.
    """

    rank: int
    tensor: int
    pipeline: int
    rendezvous: str
    join_timeout_s: float
    step_timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded; mirrors LoadModelRequest."""

    model_path: str
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: int = 0
    strict: bool = False
    cache_dir: str = ""
    quantization: str = ""
    """How the framework quantises weights as it loads them: "", w8a8 or w4a16."""
    parallel: ParallelOptions | None = None
    """None: the model is not split."""


class ModelRunner(abc.ABC):
    """Runs one model on one device."""

    takes_constraints: ClassVar[bool] = False
    """Whether `run_step` keeps to `StepBatch.allowed`, and samples after its last row's logits are there."""
    takes_ranks: ClassVar[bool] = False
    """Whether `load` takes `LoadOptions.parallel`. Then each rank gets the same calls in the same order, and
    `run_step` returns the same tokens on all of them. `load`, `allocate_kv_cache`, `exchange` and `run_step`
    raise DeadlineExceeded (reason RANKS_MISSING) or Unavailable (RANK_LOST), which name ranks: the set is
    over then.
    """

    @abc.abstractmethod
    def load(self, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Load a model. Raises InvalidArgument, FailedPrecondition or ResourceExhausted with the cause."""

    @abc.abstractmethod
    def allocate_kv_cache(self, *, page_count: int, page_size: int, max_slots: int) -> int:
        """Allocate the pages and per-slot state; returns bytes. Raises meshkit.errors.ResourceExhausted."""

    @abc.abstractmethod
    def admit(self, admission: SlotAdmission, page_ids: IntArray) -> None:
        """A request enters a slot; `page_ids` is its page table so far (cached prefix first)."""

    @abc.abstractmethod
    def release(self, slot: int) -> None:
        """The request of a slot has left."""

    @abc.abstractmethod
    def run_step(self, batch: StepBatch) -> StepOutput:
        """One forward pass and its sampling. Keeps each sampled token as its slot's last one."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Drop all slots (a scheduler attached anew). Pages keep their contents."""

    @abc.abstractmethod
    def unload(self) -> None:
        """Free weights and pages. Idempotent."""

    def exchange(self, text: str) -> Sequence[str]:
        """What each rank said, by rank, `text` being this one's; every rank must call it. Alone: its own."""
        return (text,)

    def start_timing(self, *, most_runs: int) -> StopTiming | None:
        """Time the operators of the steps to come, without changing what they make; None: only steps as a
        whole can be timed here. most_runs: runs that are told one by one; of all others the sums.
        """
        del most_runs
        return None
