"""The ways in which a model runs here: the chip's operators, the reference operators, a step program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugins.cpu.memory import CpuMemory
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import LoadOptions, PrefillRow, StepBatch
from plugins.sdk.step_program import ProgramInputs
from tests.unit.models.step_driver import StepDriver
from worker_svc.layers.step_tensors import build_step
from worker_svc.model_building import PlannedModel, allocate_pages, plan_model
from worker_svc.model_runner import OperatorModelRunner

PAGE = 8


class ReferenceBackend(CpuBackend):
    """A chip that covers no operator."""

    def __init__(self) -> None:
        super().__init__(CpuOptions(threads=1, kernel="off"))
        self._bare = OperatorSet(CpuMemory())

    @property
    def operators(self) -> OperatorSet | None:
        return self._bare

    def capabilities(self) -> CapabilityReport:
        return replace(super().capabilities(), operators=self._bare.capabilities())


def backend_of(path: str) -> CpuBackend:
    """path: "operators", "reference" or "program"."""
    if path == "reference":
        return ReferenceBackend()
    return CpuBackend(CpuOptions(threads=1, kernel="off" if path == "operators" else "auto"))


def silent(stage: str, share: float) -> None:
    """Progress that nobody watches."""


def plan(path: str, folder: Path, **options: Any) -> PlannedModel:
    """The model as that path would run it."""
    return plan_model(backend_of(path), LoadOptions(str(folder), dtype="float32", **options), silent)


def whole_logits(planned: PlannedModel, tokens: Sequence[int]) -> Tensor:
    """float32 [tokens, vocab] of one pass over all tokens, pages in no order; of a part of a model without
    the head something else.
    """
    count = len(tokens)
    pages = np.random.default_rng(3).permutation(-(-count // PAGE) + 2).astype(np.int32)
    program = planned.create_program(silent)
    sizes: dict[str, Any] = {"page_count": len(pages), "page_size": PAGE, "dtype": "float32", "device": 0}
    if program is not None:
        shape = planned.shape
        assert shape is not None
        cells = torch.zeros(shape.layers * 2 * len(pages) * PAGE * shape.kv_heads * shape.head_dim)
        program.attach_cache(cells, page_count=len(pages), page_size=PAGE)
        rows = np.arange(count, dtype=np.int32)
        inputs = ProgramInputs(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=rows,
            sequences=np.zeros(count, dtype=np.int32),
            tables=pages[None, : -(-count // PAGE)],
            sampled_rows=rows,
            sampled_slots=np.zeros(count, dtype=np.int32),
            draws=None,
        )
        return torch.from_numpy(program.run(inputs).logits.copy())
    model = planned.build(planned.operators, silent)
    _, layers = allocate_pages(planned.backend, model.kv_shape, **sizes)
    row = PrefillRow(0, 0, np.array(tokens, dtype=np.int32), pages, samples=True)
    step = build_step(
        StepBatch(decode=None, prefill=[row]),
        np.empty(0, dtype=np.int64),
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    hidden = model.forward(step, layers)
    return model.logits(hidden) if model.has_head else hidden


def drive(path: str, folder: Path, *, page_size: int = PAGE, page_count: int = 400) -> StepDriver:
    """A loaded runner under a driver."""
    runner = OperatorModelRunner(backend_of(path))
    loaded = runner.load(LoadOptions(str(folder), dtype="float32"), silent)
    served = {decision.name for decision in loaded.operators}
    assert ("llama_step" in served) is (path == "program")
    runner.allocate_kv_cache(page_count=page_count, page_size=page_size, max_slots=8)
    return StepDriver(runner, page_count=page_count, page_size=page_size)
