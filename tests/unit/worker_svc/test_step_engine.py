"""StepEngine under runners that fail: what is lost, what is refused, what is reported."""

from __future__ import annotations

import numpy as np
import pytest

from chipmesh.device.v1alpha1.execution_pb2 import (
    AdmittedRequest,
    AllocateKvCacheRequest,
    LoadModelRequest,
    PrefillChunk,
    StepPlan,
    StepResult,
)
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters
from meshkit.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MeshError,
    ResourceExhausted,
    Unavailable,
)
from plugins.hash.options import HashOptions
from plugins.hash.runner import HashRunner
from plugins.sdk.runner import LoadedModel, LoadOptions, Progress, RowFailure, StepBatch, StepOutput
from worker_svc.step_engine import EngineState, StepEngine

GREEDY = SamplingParameters(top_p=1.0, repetition_penalty=1.0)


class FailingRunner(HashRunner):
    """The hash model; `fault` is raised by the next call that touches the device."""

    def __init__(self) -> None:
        super().__init__(HashOptions())
        self.fault: Exception | None = None
        self.failed_slots: tuple[int, ...] = ()

    def load(self, options: LoadOptions, progress: Progress) -> LoadedModel:
        self._fail()
        return super().load(options, progress)

    def run_step(self, batch: StepBatch) -> StepOutput:
        self._fail()
        output = super().run_step(batch)
        good = ~np.isin(output.slots, self.failed_slots)
        failures = [RowFailure(slot, "NON_FINITE_LOGITS", "NaN") for slot in self.failed_slots]
        return StepOutput(output.slots[good], output.token_ids[good], failures=failures)

    def _fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault


@pytest.fixture
def runner() -> FailingRunner:
    return FailingRunner()


@pytest.fixture
def engine(runner: FailingRunner) -> StepEngine:
    made = StepEngine(runner)
    made.load(LoadModelRequest(), lambda _stage, _share: None)
    made.allocate(AllocateKvCacheRequest(page_count=16, page_size_tokens=4, max_slots=4))
    made.attach()
    return made


def enter(engine: StepEngine, *slots: int, step_seq: int = 1) -> StepResult:
    return engine.execute(
        StepPlan(
            epoch=engine.epoch,
            step_seq=step_seq,
            admitted=[AdmittedRequest(slot=slot, sampling=GREEDY, page_ids=[slot]) for slot in slots],
            prefill=[PrefillChunk(slot=slot, token_ids=[slot + 1], last=True) for slot in slots],
        )
    ).to_proto()


def decode(engine: StepEngine, step_seq: int) -> StepResult:
    return engine.execute(StepPlan(epoch=engine.epoch, step_seq=step_seq, decode=True)).to_proto()


def test_a_foreign_exception_is_a_device_failure_for_good(engine: StepEngine, runner: FailingRunner) -> None:
    runner.fault = RuntimeError("device-side assert")
    with pytest.raises(Unavailable, match="device-side assert"):
        enter(engine, 0)
    assert engine.state is EngineState.FAILED
    assert "step 1" in engine.failure
    with pytest.raises(Unavailable):
        engine.attach()


def test_want_of_memory_in_a_step_costs_the_epoch_and_not_the_device(
    engine: StepEngine, runner: FailingRunner
) -> None:
    enter(engine, 0)
    runner.fault = ResourceExhausted("no memory for the step")
    with pytest.raises(ResourceExhausted):
        decode(engine, 2)
    with pytest.raises(Aborted):
        decode(engine, 3)
    assert engine.occupied_slots == 0
    engine.attach()
    assert list(enter(engine, 0).slots) == [0]
    assert engine.state is EngineState.READY


def test_a_row_that_fails_does_not_harm_its_neighbours(engine: StepEngine, runner: FailingRunner) -> None:
    enter(engine, 0, 1)
    runner.failed_slots = (0,)
    result = decode(engine, 2)
    assert list(result.slots) == [1]
    assert [(failure.slot, failure.reason) for failure in result.failures] == [(0, "NON_FINITE_LOGITS")]
    runner.failed_slots = ()
    assert list(decode(engine, 3).slots) == [1]
    assert engine.occupied_slots == 2


def test_a_load_that_was_refused_may_be_tried_again(runner: FailingRunner) -> None:
    engine = StepEngine(runner)
    runner.fault = InvalidArgument("no such model", field="model_path")
    with pytest.raises(InvalidArgument):
        engine.load(LoadModelRequest(), lambda _stage, _share: None)
    states = [engine.state]
    engine.load(LoadModelRequest(), lambda _stage, _share: None)
    assert [*states, engine.state] == [EngineState.EMPTY, EngineState.LOADED]


def test_a_page_size_that_the_chip_excludes_is_refused(runner: FailingRunner) -> None:
    engine = StepEngine(runner, page_sizes=(64, 128))
    engine.load(LoadModelRequest(), lambda _stage, _share: None)
    with pytest.raises(InvalidArgument, match="64, 128"):
        engine.allocate(AllocateKvCacheRequest(page_count=1, page_size_tokens=16, max_slots=1))


def test_epochs_grow_with_every_attach(engine: StepEngine) -> None:
    before = engine.epoch
    assert engine.attach().epoch == before + 1
    with pytest.raises(Aborted):
        engine.execute(StepPlan(epoch=before, step_seq=1))


# ---------------------------------------------------------------- ranks of a set


@pytest.mark.parametrize(
    "fault",
    [
        DeadlineExceeded("rank 1 did not come in time", reason="RANKS_MISSING"),
        Unavailable("a rank was lost (rank 1 had not come)", reason="RANK_LOST"),
    ],
)
def test_a_rank_that_is_missing_is_the_end_of_the_engine_and_is_named(
    fault: MeshError, engine: StepEngine, runner: FailingRunner
) -> None:
    runner.fault = fault
    with pytest.raises(Unavailable, match="rank 1") as caught:
        enter(engine, 0)
    assert caught.value.reason == fault.reason
    assert engine.state is EngineState.FAILED
    assert "the set is over: step 1" in engine.failure
    with pytest.raises(Unavailable, match="rank 1"):
        engine.attach()


def test_of_several_causes_the_first_stays(engine: StepEngine) -> None:
    engine.fail("rank 1 was lost", reason="RANK_LOST")
    engine.fail("rank 0 was lost", reason="RANK_LOST")
    assert engine.failure == "rank 1 was lost"


def test_an_epoch_may_be_given_and_what_it_refused_is_remembered_until_the_next(engine: StepEngine) -> None:
    assert engine.attach(7).epoch == 7
    with pytest.raises(InvalidArgument):
        engine.execute(StepPlan(epoch=7, step_seq=1, prefill=[PrefillChunk(slot=3, token_ids=[1])]))
    assert engine.has_refused(7, 1)
    assert not engine.has_refused(7, 2)
    assert engine.attach().epoch == 8
    assert not engine.has_refused(7, 1)


def test_ranks_whose_pages_are_of_different_sizes_are_refused(
    runner: FailingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StepEngine(runner)
    engine.load(LoadModelRequest(), lambda _stage, _share: None)

    def exchange(text: str) -> tuple[str, str]:
        return text, text.replace('"page_size_tokens": 4', '"page_size_tokens": 8')

    monkeypatch.setattr(runner, "exchange", exchange)
    with pytest.raises(FailedPrecondition, match="rank 0: 4, rank 1: 8") as caught:
        engine.allocate(AllocateKvCacheRequest(page_count=16, page_size_tokens=4, max_slots=4))
    assert caught.value.reason == "PAGE_SIZES_DIFFER"
