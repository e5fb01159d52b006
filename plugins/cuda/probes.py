"""What is chosen at start, once: the first implementation that agrees with the reference, by trial.

FlashInfer and Triton code cannot be proved by reading: a build may lack a kernel for this GPU. What fails is
left aside with a warning; what torch itself gets wrong is declined, and the reference runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from meshkit.errors import FailedPrecondition
from meshkit.telemetry.logging import get_logger
from plugins.cuda.attention import Attention, TorchAttention
from plugins.cuda.flashinfer_attention import FlashInferAttention
from plugins.cuda.norms import Norms, TorchNorms, TritonNorms
from plugins.cuda.operators import CudaOperators
from plugins.cuda.runtime import Runtime
from plugins.cuda.triton_attention import TritonAttention
from plugins.sdk.declined import declined_at_start
from plugins.sdk.memory import MemoryManager
from plugins.sdk.trials import OperatorTrials, TrialSizes, tried_operators

log = get_logger(__name__)

_DEVICE = 0
_SIZES = (TrialSizes(), TrialSizes(heads=8, groups=1, size=128))
"""Head sizes and numbers of query heads for which the libraries have kernels of their own."""
_ATTENTION = ("attention_prefill", "attention_decode")
_NORMS = ("rms_norm", "add_rms_norm")
_KERNELS = "plugins.cuda.triton_kernels"
# Not tried by themselves (plugins.sdk.trials says why): they are as good as their parts.
_STANDS_ON = {
    "moe_experts_w8a8": ("linear_w8a8", "moe_experts"),
    "moe_experts_w4a16": ("linear_w4a16", "moe_experts"),
}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def start_operators(memory: MemoryManager, runtime: Runtime, dtypes: Sequence[str]) -> CudaOperators:
    """The operators of a runtime, chosen and compared. dtypes: that the chip computes in.

    Raises:
        FailedPrecondition: a library that the options require differs from the reference.
    """
    return _Start(memory, runtime, dtypes).run()


class _Start:
    """One start: trials with what they found."""

    def __init__(self, memory: MemoryManager, runtime: Runtime, dtypes: Sequence[str]) -> None:
        self._memory = memory
        self._runtime = runtime
        self._dtypes = dtypes
        device = runtime.place(_DEVICE)
        self._trials = OperatorTrials(
            memory=memory,
            place=lambda tensor: tensor.to(device, copy=True),
            synchronize=lambda: runtime.synchronize(_DEVICE),
            sizes=_SIZES,
        )

    @torch.inference_mode()
    def run(self) -> CudaOperators:
        attention, norms = self._choose_attention(), self._choose_norms()
        self._runtime.choices.update(attention_kernels=attention.name, norm_kernels=norms.name)
        trial = self._operators(attention, norms)
        declined = {
            name: declined_at_start(problem)
            for name in tried_operators()
            if (problem := self._problem(trial, name))
        }
        for name, parts in _STANDS_ON.items():
            if name not in declined and (fault := next((part for part in parts if part in declined), "")):
                declined[name] = declined_at_start(f"its part {fault} differs from the reference")
        for name, reason in declined.items():
            log.warning("operator is denied: it failed its comparison at start", operator=name, reason=reason)
        return CudaOperators(self._memory, self._runtime, attention, norms, declined=declined)

    def _choose_attention(self) -> Attention:
        """FlashInfer, else Triton, else torch."""
        libraries, plain = self._runtime.libraries, TorchAttention()
        candidates: list[Attention] = []
        if "flashinfer" in libraries:
            candidates.append(FlashInferAttention(libraries["flashinfer"], plain))
        if "triton" in libraries:
            candidates.append(TritonAttention(_kernels(), plain))
        norms = TorchNorms()
        problems = (
            (each, self._first_problem(self._operators(each, norms), _ATTENTION)) for each in candidates
        )
        return self._first_that_agrees(problems, plain)

    def _choose_norms(self) -> Norms:
        """Triton, else torch."""
        plain = TorchNorms()
        candidates: list[Norms] = [TritonNorms(_kernels())] if "triton" in self._runtime.libraries else []
        attention = TorchAttention()
        problems = (
            (each, self._first_problem(self._operators(attention, each), _NORMS)) for each in candidates
        )
        return self._first_that_agrees(problems, plain)

    def _first_that_agrees(self, problems: Iterable[tuple[T, str]], plain: T) -> T:
        """problems: of each candidate, found out when it is its turn."""
        for candidate, problem in problems:
            if not problem:
                return candidate
            if candidate.name in self._runtime.required:
                raise FailedPrecondition(
                    f"backend option kernel_libraries names {candidate.name}, whose {problem}; install a "
                    "release that fits this GPU and torch, or leave it out of the option",
                    field="backend_options.kernel_libraries",
                    reason="LIBRARY_DIFFERS",
                )
            log.warning("kernel library is left aside: it failed its comparison at start",
                        library=candidate.name, reason=problem)  # fmt: skip
        return plain

    def _first_problem(self, operators: CudaOperators, names: Sequence[str]) -> str:
        problems = ((name, self._problem(operators, name)) for name in names)
        return next((f"{name} was {problem}" for name, problem in problems if problem), "")

    def _problem(self, operators: CudaOperators, name: str) -> str:
        return self._trials.find_problem(operators, name, self._dtypes)

    def _operators(self, attention: Attention, norms: Norms) -> CudaOperators:
        return CudaOperators(self._memory, self._runtime, attention, norms)


def _kernels() -> Any:
    """Imported late: the file imports Triton."""
    return importlib.import_module(_KERNELS)
