"""The framework's model runner: any architecture of worker_svc.models on any plugin's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.telemetry.logging import get_logger
from plugins.sdk.backend import Backend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.memory import Buffer
from plugins.sdk.operators import OperatorSet, OperatorTable
from plugins.sdk.runner import (
    IntArray,
    LoadedModel,
    LoadOptions,
    ModelRunner,
    PrefillRow,
    Progress,
    SlotAdmission,
    StepBatch,
    StepOutput,
)
from plugins.sdk.slot_sampling import SlotSampling
from plugins.sdk.tensors import dtype_size
from worker_svc.layers.step_tensors import build_step, sampling_rows
from worker_svc.models.architecture import Model, ModelContext
from worker_svc.models.registry import find_architecture
from worker_svc.weights import DummyWeights, WeightReader, WeightSource

log = get_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_PROBE_TOKENS = 8
_PROBE_PAGE = 16


@dataclass(frozen=True)
class _Loaded:
    """A model in memory and what it runs on."""

    model: Model
    operators: OperatorTable
    dtype: torch.dtype
    kv_dtype: str
    device: torch.device
    description: LoadedModel


@dataclass(frozen=True)
class _Cache:
    """Pages of all layers: `layers[i]` is [2, pages, page, g, d], a view in the chip's order in memory."""

    buffer: Buffer
    layers: Sequence[Tensor]
    page_size: int
    sampling: SlotSampling


class OperatorModelRunner(ModelRunner):
    """Runs a model by the operators of a backend, chosen once at load by its capability report."""

    def __init__(self, backend: Backend) -> None:
        if backend.operators is None:
            raise FailedPrecondition(
                f"plugin {backend.info().name!r} has neither operators nor a runner of its own",
                field="backend",
            )
        self._backend = backend
        self._operators: OperatorSet = backend.operators
        self._device = 0
        self._loaded: _Loaded | None = None
        self._cache: _Cache | None = None

    def load(self, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Read, pack and check a model."""
        if self._loaded is not None:
            raise FailedPrecondition("a model is loaded; unload it first", reason="MODEL_LOADED")
        report = self._backend.capabilities()
        self._backend.devices.properties(options.device)
        dtype = _choose(options.dtype, report.compute_dtypes, "dtype")
        kv_dtype = _choose_kv_dtype(options.kv_cache_dtype, dtype, report)
        folder = _open(options, progress)
        architecture, factory = find_architecture(folder.config)
        table = self._operators.choose(dtype, strict=options.strict)
        _log_fallbacks(table)
        context = ModelContext(
            config=folder.config,
            source=_weights(folder, options.load_format),
            operators=table,
            dtype=getattr(torch, dtype),
            device=self._operators.torch_device(options.device),
            progress=lambda share: progress("weights", share),
        )
        model = self._backend.execute_runnable(lambda: factory(context))
        self._device = options.device
        description = _describe(folder, architecture, model, dtype, kv_dtype, report, table)
        loaded = _Loaded(model, table, context.dtype, kv_dtype, context.device, description)
        progress("first forward", 0.0)
        self._check_first_forward(loaded)
        progress("first forward", 1.0)
        self._loaded = loaded
        return description

    def allocate_kv_cache(self, *, page_count: int, page_size: int, max_slots: int) -> int:
        """[layers, 2, pages, page, g, d] in the chip's order in memory, zeroed: attention multiplies masked
        cells by 0, and NaN x 0 is NaN.
        """
        loaded = self._require_model()
        if self._cache is not None:
            raise FailedPrecondition(
                "a KV cache is allocated; unload the model first", reason="KV_CACHE_ALLOCATED"
            )
        buffer, layers = self._allocate_pages(loaded, page_count, page_size)
        sampling = SlotSampling(
            max_slots=max_slots, vocab_size=loaded.description.vocab_size, device=loaded.device
        )
        self._cache = _Cache(buffer, layers, page_size, sampling)
        return buffer.nbytes

    def admit(self, admission: SlotAdmission, page_ids: IntArray) -> None:
        """Take the slot's sampling settings; page tables come with each step."""
        self._require_cache().sampling.admit(admission)

    def release(self, slot: int) -> None:
        """Forget the slot."""
        self._require_cache().sampling.release(slot)

    def run_step(self, batch: StepBatch) -> StepOutput:
        """One forward pass over all rows; the head runs for rows that sample only."""
        loaded, cache = self._require_model(), self._require_cache()
        return self._backend.execute_runnable(lambda: _run_step(batch, loaded, cache))

    def reset(self) -> None:
        """Forget all slots."""
        if self._cache is not None:
            self._cache.sampling.reset()

    def unload(self) -> None:
        """Free weights and pages."""
        if self._cache is not None:
            self._backend.memory.free(self._cache.buffer)
        self._cache = None
        self._loaded = None

    def _require_model(self) -> _Loaded:
        if self._loaded is None:
            raise FailedPrecondition("no model is loaded; call LoadModel first", reason="NO_MODEL")
        return self._loaded

    def _require_cache(self) -> _Cache:
        if self._cache is None:
            raise FailedPrecondition(
                "no KV cache is allocated; call AllocateKvCache first", reason="NO_KV_CACHE"
            )
        return self._cache

    def _allocate_pages(self, loaded: _Loaded, pages: int, page_size: int) -> tuple[Buffer, Sequence[Tensor]]:
        shape, layout = loaded.model.kv_shape, self._operators.kv_layout
        buffer = self._backend.memory.allocate(
            (shape.layers, *layout.memory_shape((2, pages, page_size, shape.heads, shape.head_dim))),
            loaded.kv_dtype,
            self._device,
            zeroed=True,
        )
        tensor: Tensor = buffer.tensor
        return buffer, [layout.as_cache(layer) for layer in tensor.unbind(0)]

    def _check_first_forward(self, loaded: _Loaded) -> None:
        """Raises FailedPrecondition that names the first stage whose result is not finite."""
        buffer, layers = self._allocate_pages(loaded, 1, _PROBE_PAGE)
        try:
            self._backend.execute_runnable(lambda: _probe(loaded, layers))
        finally:
            self._backend.memory.free(buffer)


def _run_step(batch: StepBatch, loaded: _Loaded, cache: _Cache) -> StepOutput:
    step = build_step(
        batch,
        cache.sampling.last_tokens,
        page_size=cache.page_size,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    hidden = loaded.model.forward(step, cache.layers)
    rows, slots = sampling_rows(batch)
    if not len(rows):
        return StepOutput(slots=np.empty(0, dtype=np.int32), token_ids=np.empty(0, dtype=np.int32))
    if len(rows) < hidden.shape[0]:
        hidden = hidden[torch.from_numpy(rows).to(loaded.device)]
    sampled = cache.sampling.sample(loaded.model.logits(hidden), slots, loaded.operators)
    return StepOutput(sampled.slots, sampled.token_ids, sampled.logprobs, sampled.failures)


def _probe(loaded: _Loaded, layers: Sequence[Tensor]) -> None:
    count = min(_PROBE_TOKENS, loaded.description.vocab_size)
    row = PrefillRow(
        slot=0,
        start=0,
        token_ids=np.linspace(0, loaded.description.vocab_size - 1, count).astype(np.int32),
        page_ids=np.zeros(1, dtype=np.int32),
        samples=True,
    )
    step = build_step(
        StepBatch(decode=None, prefill=[row]),
        np.empty(0, dtype=np.int64),
        page_size=_PROBE_PAGE,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    stages: list[str] = []

    def observe(stage: str, values: Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            stages.append(stage)

    logits = loaded.model.logits(loaded.model.forward(step, layers, observe))
    observe("head", logits)
    if stages:
        raise FailedPrecondition(
            f"the first forward pass gave values that are not finite, first in {stages[0]}; the weights are "
            f"damaged or {loaded.description.numeric_class} is too narrow for this model",
            field="model_path",
            reason="NON_FINITE_LOGITS",
            stage=stages[0],
        )


def _choose(requested: str, supported: Sequence[str], field: str) -> str:
    """The dtype meant; "auto" is the report's best."""
    if requested in ("", "auto"):
        return supported[0]
    if requested not in supported:
        raise InvalidArgument(
            f"{field} is {requested!r}; this chip supports auto, {', '.join(supported)}",
            field=field,
            reason="DTYPE_UNSUPPORTED",
        )
    return requested


def _choose_kv_dtype(requested: str, dtype: str, report: CapabilityReport) -> str:
    if requested in ("", "auto") and dtype in report.kv_cache_dtypes:
        return dtype
    return _choose(requested, report.kv_cache_dtypes, "kv_cache_dtype")


def _open(options: LoadOptions, progress: Progress) -> ModelFolder:
    if options.load_format not in LOAD_FORMATS:
        raise InvalidArgument(
            f"load_format is {options.load_format!r}; supported: {', '.join(LOAD_FORMATS)}",
            field="load_format",
        )
    folder = open_model(
        options.model_path,
        cache_dir=Path(options.cache_dir) if options.cache_dir else default_cache_dir(),
        progress=progress,
        need_weights=options.load_format != "dummy",
    )
    wanted = options.load_format
    if wanted in ("safetensors", "gguf") and folder.weights is not None:
        other = [file for file in folder.weights.files if file.suffix != f".{wanted}"]
        if other:
            raise InvalidArgument(
                f"load_format is {wanted!r}, but the weights of {options.model_path!r} are in "
                f"{other[0].name}; use auto",
                field="load_format",
            )
    return folder


def _weights(folder: ModelFolder, load_format: str) -> WeightSource:
    if load_format == "dummy" or folder.weights is None:
        return DummyWeights(folder.config, seed=0)
    return WeightReader(folder.weights)


def _describe(
    folder: ModelFolder,
    architecture: str,
    model: Model,
    dtype: str,
    kv_dtype: str,
    report: CapabilityReport,
    table: OperatorTable,
) -> LoadedModel:
    return LoadedModel(
        architecture=architecture,
        vocab_size=folder.vocab_size,
        context_tokens=folder.context_length,
        kv_bytes_per_token=model.kv_shape.values_per_token * dtype_size(kv_dtype),
        weight_bytes=model.weight_bytes,
        weights_version=folder.weights_version,
        numeric_class=dtype,
        kv_cache_dtype=kv_dtype,
        kv_layout=report.kv_layout,
        eos_token_ids=folder.eos_token_ids,
        operators=table.decisions,
    )


def _log_fallbacks(table: OperatorTable) -> None:
    for decision in table.decisions:
        if decision.choice == "reference":
            log.warning("operator runs on the reference", operator=decision.name, reason=decision.reason)
