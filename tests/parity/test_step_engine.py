"""Plans of a scheduler through the step engine: chunks, and steps that decode beside a chunk."""

from __future__ import annotations

import pytest

from chipmesh.device.v1alpha1.execution_pb2 import (
    AdmittedRequest,
    AllocateKvCacheRequest,
    LoadModelRequest,
    PrefillChunk,
    StepPlan,
)
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters
from tests.parity.conftest import Family
from tests.parity.paths import PAGE, backend_of, silent
from tests.parity.tiny_models import PROMPTS, VARIANTS
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.step_engine import StepEngine

GREEDY = SamplingParameters(temperature=0.0, top_p=1.0, repetition_penalty=1.0)
CHUNK = 16
PAGES = 8
"""Of each slot."""


def ready_engine(family: Family) -> StepEngine:
    path = "program" if VARIANTS[family.name].by_program else "operators"
    engine = StepEngine(OperatorModelRunner(backend_of(path)))
    engine.load(LoadModelRequest(model_path=str(family.folder), dtype="float32"), silent)
    engine.allocate(AllocateKvCacheRequest(page_count=40, page_size_tokens=PAGE, max_slots=4))
    engine.attach()
    return engine


def chunks_of(slot: int, prompt: list[int]) -> list[PrefillChunk]:
    starts = range(0, len(prompt), CHUNK)
    return [
        PrefillChunk(
            slot=slot,
            start=start,
            token_ids=prompt[start : start + CHUNK],
            last=start + CHUNK >= len(prompt),
        )
        for start in starts
    ]


@pytest.mark.parametrize("family", VARIANTS, indirect=True)
def test_plans_make_the_tokens_of_transformers(family: Family) -> None:
    engine = ready_engine(family)
    prompts = dict(enumerate(PROMPTS))
    waiting = {slot: chunks_of(slot, prompt) for slot, prompt in prompts.items()}
    made: dict[int, list[int]] = {slot: [] for slot in prompts}
    for step_seq in range(1, 24):
        plan = StepPlan(epoch=engine.epoch, step_seq=step_seq, decode=any(made.values()))
        if step_seq <= len(prompts):
            slot = step_seq - 1
            pages = [slot + 4 * index for index in range(PAGES)]
            plan.admitted.append(AdmittedRequest(slot=slot, sampling=GREEDY, page_ids=pages))
        admitted = [slot for slot in prompts if slot < step_seq]
        plan.prefill.extend(waiting[slot].pop(0) for slot in admitted if waiting[slot])
        result = engine.execute(plan).to_proto()
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            made[slot].append(token)
    for slot, prompt in prompts.items():
        assert len(made[slot]) > 16
        family.oracle.check_greedy(prompt, made[slot], where=f"slot {slot}")
