"""The framework's model runner: any architecture of worker_svc.models on any plugin's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshkit.errors import DeadlineExceeded, FailedPrecondition, MeshError, ResourceExhausted, Unavailable
from meshkit.telemetry.logging import get_logger
from plugins.sdk.backend import Backend
from plugins.sdk.memory import Buffer
from plugins.sdk.operator_table import OperatorTable
from plugins.sdk.planning import (
    FALLBACKS,
    choose_page_size,
    plan_operators,
)
from plugins.sdk.runner import (
    AllowedTokens,
    FloatArray,
    IntArray,
    LoadedModel,
    LoadOptions,
    ModelRunner,
    Progress,
    SlotAdmission,
    StepBatch,
    StepOutput,
)
from plugins.sdk.slot_sampling import Sampled, Samplers, SlotSampling
from plugins.sdk.step_program import StepProgram
from plugins.sdk.tensors import dtype_size
from plugins.sdk.timing import StopTiming, join
from worker_svc.first_forward import (
    BuildObserved,
    describe_failure,
    find_bad_operator,
    is_finite,
    probe_tokens,
)
from worker_svc.kv_scales import SCALED_DTYPES
from worker_svc.layers.step_tensors import build_step, sampling_rows
from worker_svc.model_building import PlannedModel, allocate_pages, plan_model, require_operators
from worker_svc.models.architecture import KvShape, Model
from worker_svc.observed_operators import ObservedOperators
from worker_svc.parallel.ranks import Ranks
from worker_svc.parallel.set_loading import (
    all_finite,
    check_same_model,
    first_of_set,
    join_ranks,
    settle_allocation,
)
from worker_svc.parallel.tokens import share_tokens, take_tokens
from worker_svc.program_runs import kv_shape_of, probe_is_finite, run_batch
from worker_svc.timed_operators import TimedOperators

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Loaded:
    """A model in memory and what it runs on."""

    planned: PlannedModel
    model: Model | StepProgram
    samplers: Samplers
    description: LoadedModel
    timed: TimedOperators
    ranks: Ranks | None = None
    """Links to the other ranks; None: the model is not split."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.planned.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.planned.dtype

    @property
    def kv_shape(self) -> KvShape:
        """What its cache holds for a token."""
        return _kv_shape(self.planned, self.model)


@dataclass(frozen=True)
class _Cache:
    """Pages of all layers: `layers[i]` is [2, pages, page, g, d], a view in the chip's order in memory."""

    buffer: Buffer
    layers: Sequence[Tensor]
    page_size: int
    sampling: SlotSampling


class OperatorModelRunner(ModelRunner):
    """Runs a model by the operators of a backend, chosen once at load by its capability report."""

    takes_constraints = True
    takes_ranks = True

    def __init__(self, backend: Backend) -> None:
        require_operators(backend)
        self._backend = backend
        self._device = 0
        self._loaded: _Loaded | None = None
        self._cache: _Cache | None = None

    def load(self, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Read, pack and check a model."""
        if self._loaded is not None:
            raise FailedPrecondition("a model is loaded; unload it first", reason="MODEL_LOADED")
        self._device = options.device
        planned = plan_model(self._backend, options, progress)
        ranks = self._run(lambda: join_ranks(self._backend, options, planned.device))
        if ranks is not None:
            planned = replace(planned, links=ranks)
        try:
            self._loaded = self._load(planned, ranks, progress)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        return self._loaded.description

    def _load(self, planned: PlannedModel, ranks: Ranks | None, progress: Progress) -> _Loaded:
        table = planned.operators
        choice = planned.plan.step_program
        log.info("step program", pattern=choice.value, reason=choice.reason)
        _log_fallbacks(table)
        timed = TimedOperators(table, wait=self._backend.synchronize, backend=planned.plan.chip)
        model = planned.create_program(progress) or planned.build(timed, progress)
        description = _describe(planned, model)
        samplers = Samplers.bind(timed, planned.folder.vocab_size)
        loaded = _Loaded(planned, model, samplers, description, timed, ranks)
        if ranks is not None:
            self._run(lambda: check_same_model(ranks, description))
        progress("first forward", 0.0)
        self._check_first_forward(
            loaded, lambda observe: planned.build(ObservedOperators(table, observe), progress)
        )
        progress("first forward", 1.0)
        if ranks is not None:
            ranks.enter_steps()
        return loaded

    def allocate_kv_cache(self, *, page_count: int, page_size: int, max_slots: int) -> int:
        """[layers, 2, pages, page, g, d] in the chip's order in memory, zeroed: attention multiplies masked
        cells by 0, and NaN x 0 is NaN.
        """
        loaded = self._require_model()
        if self._cache is not None:
            raise FailedPrecondition(
                "a KV cache is allocated; unload the model first", reason="KV_CACHE_ALLOCATED"
            )
        self._check_page_size(loaded, page_size)
        buffer, layers = self._allocate_with_ranks(loaded, page_count, page_size)
        sampling = SlotSampling(
            max_slots=max_slots, vocab_size=loaded.description.vocab_size, device=loaded.device
        )
        if isinstance(loaded.model, StepProgram):
            loaded.model.attach_cache(buffer.tensor, page_count=page_count, page_size=page_size)
        self._cache = _Cache(buffer, layers, page_size, sampling)
        return buffer.nbytes

    def admit(self, admission: SlotAdmission, page_ids: IntArray) -> None:
        """Take the slot's sampling settings; page tables come with each step."""
        self._require_cache().sampling.admit(admission)

    def release(self, slot: int) -> None:
        """Forget the slot."""
        self._require_cache().sampling.release(slot)

    def run_step(self, batch: StepBatch) -> StepOutput:
        """One forward pass over all rows; the head runs for rows that sample only.

        Raises:
            ResourceExhausted: the device has no memory left for this step. It is well, and takes others.
        """
        loaded, cache = self._require_model(), self._require_cache()
        try:
            model = loaded.model
            if isinstance(model, StepProgram):
                return self._run_program(batch, model, loaded, cache)
            if loaded.ranks is None:
                return self._run(lambda: _run_step(batch, model, loaded, cache))
            with _leaving_on_errors(loaded.ranks):
                return self._run(lambda: _run_step(batch, model, loaded, cache))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ResourceExhausted(
                f"the device has no memory left for a step: {error}. Lower mem_fraction_static, "
                "max_running_requests or chunked_prefill_size",
                reason="OUT_OF_DEVICE_MEMORY",
            ) from error

    def exchange(self, text: str) -> Sequence[str]:
        """As the contract says."""
        ranks = self._require_model().ranks
        return (text,) if ranks is None else self._run(lambda: ranks.exchange(text))

    def start_timing(self, *, most_runs: int) -> StopTiming | None:
        """Of a step program as far as it can tell; of operators, and what ranks exchange, by themselves."""
        loaded = self._require_model()
        stops = [loaded.timed.start(most_runs=most_runs)]
        if loaded.ranks is not None:
            stops.append(loaded.ranks.start_timing(most_runs=most_runs))
        if isinstance(loaded.model, StepProgram):
            stop = loaded.model.start_timing(most_runs=most_runs)
            if stop is None:
                stops[0]()
                return None
            stops.append(stop)
        return lambda: join(stop() for stop in stops)

    def reset(self) -> None:
        """Forget all slots."""
        if self._cache is not None:
            self._cache.sampling.reset()

    def unload(self) -> None:
        """Free weights and pages."""
        if self._cache is not None:
            self._backend.memory.free(self._cache.buffer)
        if self._loaded is not None and self._loaded.ranks is not None:
            self._loaded.ranks.close()
        self._cache = None
        self._loaded = None

    def _run_program(
        self, batch: StepBatch, program: StepProgram, loaded: _Loaded, cache: _Cache
    ) -> StepOutput:
        """A program needs none of the chip's settings around it; the operators that sample beside it do."""

        def sample(logits: FloatArray, slots: IntArray, allowed: AllowedTokens | None) -> Sampled:
            return self._backend.execute_runnable(
                lambda: cache.sampling.sample(torch.from_numpy(logits), slots, loaded.samplers, allowed)
            )

        return run_batch(batch, program, cache.sampling, sample, page_size=cache.page_size)

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
        return allocate_pages(
            self._backend,
            loaded.kv_shape,
            page_count=pages,
            page_size=page_size,
            dtype=loaded.planned.plan.kv_cache_dtype.value,
            device=self._device,
        )

    def _allocate_with_ranks(
        self, loaded: _Loaded, pages: int, page_size: int
    ) -> tuple[Buffer, Sequence[Tensor]]:
        """Returns when all ranks have theirs: none is then late for the first step."""
        allocated: tuple[Buffer, Sequence[Tensor]] | None = None
        problem: MeshError | None = None
        try:
            allocated = self._allocate_pages(loaded, pages, page_size)
        except MeshError as error:
            problem = error
        try:
            self._run(lambda: settle_allocation(loaded.ranks, problem))
        except MeshError:
            if allocated is not None:
                self._backend.memory.free(allocated[0])
            raise
        assert allocated is not None, "a problem has been raised"
        return allocated

    def _check_page_size(self, loaded: _Loaded, page_size: int) -> None:
        """The plan was made for the chip's preferred size; another one may break an operator's constraint."""
        report = self._backend.capabilities()
        choose_page_size(page_size, report.page_sizes_tokens)
        planned = loaded.planned
        plan_operators(report.operators, planned.sites, dtype=planned.plan.dtype.value, page_size=page_size)

    def _check_first_forward(self, loaded: _Loaded, build: BuildObserved) -> None:
        """Raises FailedPrecondition that names the first operator whose result is not finite; of a split
        model on all ranks, whichever has it.
        """
        page_size: int = loaded.planned.plan.page_size.value
        buffer, layers = self._allocate_pages(loaded, 1, page_size)
        vocab_size = loaded.description.vocab_size
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "dtype": loaded.dtype, "page_size": page_size}
        model = loaded.model
        if isinstance(model, StepProgram):
            model.attach_cache(buffer.tensor, page_count=1, page_size=page_size)
            probe = partial(probe_is_finite, model, probe_tokens(vocab_size, page_size))
        else:
            probe = partial(is_finite, model, layers, **sizes)
        try:
            if not self._run(lambda: all_finite(loaded.ranks, probe())):
                found = self._run(partial(find_bad_operator, build, layers, **sizes))
                raise describe_failure(self._run(lambda: first_of_set(loaded.ranks, found)), loaded.dtype)
        finally:
            self._backend.memory.free(buffer)

    def _run(self, work: Callable[[], T]) -> T:
        return self._backend.execute_runnable(work)


@contextmanager
def _leaving_on_errors(ranks: Ranks) -> Iterator[None]:
    """An error of this rank's own: the others would wait for it in vain, so it leaves them."""
    try:
        yield
    except (DeadlineExceeded, Unavailable):
        raise
    except BaseException:
        ranks.close()
        raise


def _run_step(batch: StepBatch, model: Model, loaded: _Loaded, cache: _Cache) -> StepOutput:
    step = build_step(
        batch,
        cache.sampling.last_tokens,
        page_size=cache.page_size,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    hidden = model.forward(step, cache.layers)
    rows, slots = sampling_rows(batch)
    if not len(rows):
        return StepOutput(slots=np.empty(0, dtype=np.int32), token_ids=np.empty(0, dtype=np.int32))
    logits = None
    if model.has_head:
        if len(rows) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(rows).to(loaded.device)]
        logits = model.logits(hidden)
    sampled = _sample(logits, slots, batch.allowed, loaded, cache)
    return StepOutput(sampled.slots, sampled.token_ids, sampled.logprobs, sampled.failures)


def _sample(
    logits: Tensor | None, slots: IntArray, allowed: AllowedTokens | None, loaded: _Loaded, cache: _Cache
) -> Sampled:
    """By the one rank that samples; the others are told."""
    ranks = loaded.ranks
    if ranks is not None and not ranks.samples:
        return take_tokens(ranks, slots, cache.sampling)
    assert logits is not None, "the rank that samples has the head"
    sampled = cache.sampling.sample(logits, slots, loaded.samplers, allowed)
    if ranks is not None:
        share_tokens(ranks, slots, sampled)
    return sampled


def _kv_shape(planned: PlannedModel, model: Model | StepProgram) -> KvShape:
    return kv_shape_of(planned.shape) if isinstance(model, StepProgram) else model.kv_shape


def _describe(planned: PlannedModel, model: Model | StepProgram) -> LoadedModel:
    folder, plan, policy = planned.folder, planned.plan, planned.policy
    kv_dtype: str = plan.kv_cache_dtype.value
    suffix = f"+{policy.label}" if policy.label else ""
    return LoadedModel(
        architecture=planned.architecture,
        vocab_size=folder.vocab_size,
        context_tokens=folder.context_length,
        kv_bytes_per_token=_kv_shape(planned, model).values_per_token * dtype_size(kv_dtype),
        weight_bytes=model.weight_bytes,
        weights_version=f"{folder.weights_version}{suffix if policy.quantizes else ''}",
        numeric_class=f"{plan.dtype.value}{suffix}{_of_the_cache(planned)}{_order_of_sums(planned)}",
        kv_cache_dtype=kv_dtype,
        kv_layout="+".join(filter(None, (plan.kv_layout.value, planned.kv_scales.identity))),
        eos_token_ids=folder.eos_token_ids,
        tokenizer_file=str(folder.tokenizer_file),
        operators=plan.served_by(),
    )


def _of_the_cache(planned: PlannedModel) -> str:
    """A cache of 8 bits rounds what was computed to other numbers."""
    kv_dtype: str = planned.plan.kv_cache_dtype.value
    return f"+kv-{kv_dtype}" if kv_dtype in SCALED_DTYPES else ""


def _order_of_sums(planned: PlannedModel) -> str:
    """Sums over tensor ranks have an order of their own; stages change no bit."""
    tensor = planned.links.place.layout.tensor
    return f"+tp{tensor}" if tensor > 1 else ""


def _log_fallbacks(table: OperatorTable) -> None:
    for decision in table.decisions:
        if decision.choice in FALLBACKS:
            say = log.warning if decision.choice == "reference" else log.info
            say(
                "operator falls back",
                operator=decision.name,
                choice=decision.choice,
                where=decision.where,
                reason=decision.reason,
            )
