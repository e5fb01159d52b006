"""Sums, overlap and trace of a recording; operators that are timed one by one; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipmesh.device.v1alpha1.execution_pb2 import LoadModelRequest, PrefillChunk, StepPlan
from meshkit.cli.profile import print_profile
from meshkit.errors import FailedPrecondition
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.hash.options import HashOptions
from plugins.hash.runner import HashRunner
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.timing import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    LINEAR,
    MLP,
    OperatorRun,
    OperatorTimes,
    OperatorTotal,
    TimedOperator,
    TimingLog,
    class_of,
)
from tests.unit.models.step_driver import StepDriver
from tests.unit.models.test_model_runner import PROMPT, ReferenceBackend, load
from tests.unit.models.tiny_llama import write_model
from worker_svc.profile import recorder
from worker_svc.profile.communication import overlap_s
from worker_svc.profile.recorder import Recording, StepRecord, StepRecorder
from worker_svc.profile.summary import summarise
from worker_svc.profile.trace import write_trace
from worker_svc.step_engine import StepEngine

# Trace Event Format, the part that we write: complete events and metadata.
TRACE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit", "chipmesh"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "pid", "tid", "name", "args"],
                "properties": {
                    "pid": {"type": "integer"},
                    "tid": {"type": "integer"},
                    "name": {"type": "string", "minLength": 1},
                    "args": {"type": "object"},
                },
                "oneOf": [
                    {
                        "properties": {
                            "ph": {"const": "X"},
                            "ts": {"type": "number", "minimum": 0},
                            "dur": {"type": "number", "minimum": 0},
                            "cat": {"enum": ["step", "gap", *CLASSES]},
                        },
                        "required": ["ts", "dur", "cat"],
                    },
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "thread_name", "thread_sort_index"]},
                        }
                    },
                ],
            },
        },
    },
}

ATTEND = TimedOperator("attention_decode", ATTENTION, native=True, program="kernel")
DOWN = TimedOperator("linear", MLP, native=False, program="reference, by torch")
REDUCE = TimedOperator("all_reduce", COMMUNICATION, native=True, program="collectives")


def recording(*, times: OperatorTimes | None = None) -> Recording:
    """Two steps of 2 s within 10 s."""
    steps = [StepRecord(1, 101.0, 2.0, 5, 1), StepRecord(2, 104.0, 2.0, 0, 3)]
    return Recording(100.0, 110.0, steps, 2, 4.0, 5, 4, 0.0, times)


def times(*runs: tuple[TimedOperator, float, float]) -> OperatorTimes:
    """(operator, begin, seconds) each."""
    log = TimingLog(100)
    for run in runs:
        log.add(*run)
    return log.times()


def test_classes_and_host_add_up_to_the_steps_and_idle_to_the_rest() -> None:
    made = summarise(recording(times=times((ATTEND, 101.0, 1.5), (DOWN, 102.5, 0.5), (ATTEND, 104.0, 1.0))))
    assert (made["step_s"], made["idle_s"], made["idle_share"]) == (4.0, 6.0, 0.6)
    by_class = {line["class"]: line for line in made["classes"]}
    assert {name: line["seconds"] for name, line in by_class.items()} == {
        ATTENTION: 2.5, MLP: 0.5, "host": 1.0,
    }  # fmt: skip
    assert sum(line["share"] for line in made["classes"]) == pytest.approx(1.0)
    assert by_class[ATTENTION]["calls"] == 2
    assert (by_class[ATTENTION]["native"], by_class[MLP]["native"]) == (True, False)
    assert by_class[MLP]["programs"] == ["reference, by torch"]
    assert [line["operator"] for line in made["operators"]] == ["attention_decode", "linear"]


def test_communication_behind_computing_is_told_from_that_which_is_waited_for() -> None:
    made = summarise(
        recording(
            times=times((ATTEND, 101.0, 1.0), (REDUCE, 101.5, 1.0), (DOWN, 104.0, 1.0), (REDUCE, 105.5, 1.0))
        )
    )
    assert made["communication"] == {
        "calls": 2, "size_bytes": 0, "seconds": 2.0, "waited_s": 2.0,
        "overlapped_s": 0.5, "overlap_share": 0.25,
        "per_step": {"steps": 2, "seconds": 1.0, "overlapped_s": 0.25, "waited_s": 1.0},
    }  # fmt: skip


def begun(begin_s: float, seconds: float, *, waited_s: float) -> OperatorRun:
    return OperatorRun(REDUCE, begin_s, seconds, size_bytes=4096, waited_s=waited_s)


def test_a_sum_that_was_begun_holds_its_step_only_while_it_is_waited_for() -> None:
    log = TimingLog(100)
    log.add(ATTEND, 101.0, 0.5)
    log.add_run(begun(101.5, 1.0, waited_s=0.25))
    log.add(DOWN, 101.5, 0.75)
    made = summarise(recording(times=log.times()))
    by_class = {line["class"]: line["seconds"] for line in made["classes"]}
    assert by_class == {ATTENTION: 0.5, MLP: 0.75, COMMUNICATION: 0.25, "host": 2.5}
    (reduce,) = [line for line in made["operators"] if line["class"] == COMMUNICATION]
    assert (reduce["calls"], reduce["size_bytes"], reduce["seconds"]) == (1, 4096, 0.25)
    assert made["communication"]["overlapped_s"] == 0.75
    assert made["communication"]["per_step"]["steps"] == 2
    assert not any("no communication" in note for note in made["notes"])


def test_the_table_has_collectives_with_their_bytes_and_what_steps_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = TimingLog(100)
    log.add_run(begun(101.5, 1.0, waited_s=0.25))
    log.add(DOWN, 101.5, 0.75)
    print_profile({"worker": "w", "trace": "t", **summarise(recording(times=log.times()))})
    shown = capsys.readouterr().out
    assert re.search(r"all_reduce, 4.0 KiB a call +250.0 +6.2% +1 +250000.0 +native: collectives", shown)
    assert (
        "communication under way 1000.0 ms, 75.0% of it behind computing; steps waited 250.0 ms for it"
        in shown
    )
    assert (
        "a step (mean of 2): 500.000 ms under way, 375.000 ms behind computing, 125.000 ms waited for"
        in shown
    )


def test_sums_under_way_at_once_have_lanes_of_their_own_and_steps_say_what_they_waited_for() -> None:
    log = TimingLog(100)
    for run in (
        begun(101.0, 1.0, waited_s=0.0),
        begun(101.5, 1.5, waited_s=1.0),
        begun(102.0, 0.5, waited_s=0.5),
    ):
        log.add_run(run)
    made = recording(times=log.times())
    trace = json.loads(write_trace(made, summarise(made)))
    jsonschema.validate(trace, TRACE_SCHEMA)
    names = {
        each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"
    }
    drawn = [each for each in trace["traceEvents"] if each.get("cat") == COMMUNICATION]
    assert [names[each["tid"]] for each in drawn] == ["communication", "communication 2", "communication"]
    assert drawn[1]["args"]["size_bytes"] == 4096
    assert drawn[1]["args"]["waited_us"] == 1e6
    first, second = (
        each["args"]["communication"] for each in trace["traceEvents"] if each.get("cat") == "step"
    )
    assert (first["calls"], first["seconds"], first["waited_s"]) == (3, 2.0, 1.5)
    assert second["calls"] == 0


def test_steps_whose_operators_are_not_all_drawn_tell_nothing_of_their_communication() -> None:
    log = TimingLog(2)
    for run in ((REDUCE, 101.0, 0.5), (ATTEND, 101.5, 0.5), (REDUCE, 104.0, 0.5)):
        log.add(*run)
    assert summarise(recording(times=log.times()))["communication"]["per_step"]["steps"] == 0
    whole = times((REDUCE, 101.0, 0.5), (ATTEND, 101.5, 0.5), (REDUCE, 104.0, 0.5))
    assert summarise(recording(times=whole))["communication"]["per_step"]["steps"] == 2


@given(
    *[st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12) for _ in range(2)],
)
def test_overlap_is_the_time_that_both_have_in_common(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    def ticks(spans: list[tuple[int, int]]) -> set[int]:
        return {tick for begin, length in spans for tick in range(begin, begin + length)}

    expected = len(ticks(first) & ticks(second))
    as_spans = [
        [(float(begin), float(begin + length)) for begin, length in spans] for spans in (first, second)
    ]
    assert overlap_s(*as_spans) == expected


def test_a_trace_is_valid_and_has_every_step_gap_and_run() -> None:
    made = recording(times=times((ATTEND, 101.0, 1.5), (DOWN, 104.25, 0.5)))
    trace = json.loads(write_trace(made, {"worker": "w", "chip": "c", **summarise(made)}))
    jsonschema.validate(trace, TRACE_SCHEMA)
    spans = [
        (event["cat"], event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if "ts" in event
    ]
    assert spans == [
        ("step", "prefill step", 1e6, 2e6),
        ("step", "decode step", 4e6, 2e6),
        ("gap", "idle", 0.0, 1e6),
        ("gap", "idle", 3e6, 1e6),
        ("gap", "idle", 6e6, 4e6),
        (ATTENTION, "attention_decode", 1e6, 1.5e6),
        (MLP, "linear", 4.25e6, 0.5e6),
    ]
    lanes = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert list(lanes.values()) == ["steps", "gaps", *CLASSES]
    for event in trace["traceEvents"]:
        if event.get("cat") in CLASSES:
            assert lanes[event["tid"]] == event["cat"]
    assert trace["chipmesh"]["worker"] == "w"
    assert trace["chipmesh"]["steps"] == 2


def test_memory_is_bounded_and_what_is_not_drawn_is_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_STEPS", 3)
    made = StepRecorder(None, now=0.0)
    for number in range(10):
        plan = StepPlan(step_seq=number, prefill=[PrefillChunk(slot=0, token_ids=[1, 2])])
        made.step(plan, number, number + 0.5, sampled_tokens=1, constraint_s=None)
    ended = made.end(20.0)
    assert len(ended.steps) == 3
    assert (ended.step_count, ended.step_s, ended.prefill_tokens, ended.sampled_tokens) == (10, 5.0, 20, 10)
    summary = summarise(ended)
    assert "the inside of its steps" in summary["notes"][0]
    assert summary["classes"] == []
    last = [event for event in json.loads(write_trace(ended, {}))["traceEvents"] if event.get("cat") == "gap"]
    assert max(event["ts"] for event in last) < 3e6, "a gap that reaches over steps that are not drawn"


def test_every_operator_of_the_catalogue_has_a_class() -> None:
    assert {class_of(name) for name in CATALOGUE} <= set(CLASSES)
    assert class_of("linear", ".layers.3.mlp.down_proj.") == MLP
    assert class_of("linear", ".layers.3.self_attn.o_proj.") == LINEAR


# ---------------------------------------------------------------- operators one by one


@pytest.mark.parametrize(
    "backend", [ReferenceBackend, lambda: CpuBackend(CpuOptions(threads=1, kernel="off"))]
)
def test_operators_are_timed_one_by_one_and_choose_the_same_tokens(tmp_path: Path, backend: Any) -> None:
    model = write_model(tmp_path / "tiny")
    runner = load(model, backend(), load_format="dummy")
    runner.allocate_kv_cache(page_count=60, page_size=4, max_slots=8)
    driver = StepDriver(runner, page_count=60, page_size=4)
    (expected,) = driver.run([driver.admit(0, PROMPT, room=6)], 6, chunk=512)
    stop = runner.start_timing(most_runs=50)
    assert stop is not None
    (timed,) = driver.run([driver.admit(1, PROMPT, room=6)], 6, chunk=512)
    times_ = stop()
    assert timed == expected
    kinds = {total.operator.kind for total in times_.totals}
    assert {"attention", "linear", "mlp", "norm", "embedding", "sampling"} <= kinds
    assert len(times_.runs) == 50
    assert "one by one" in times_.notes[0]
    natives = {total.operator.native for total in times_.totals}
    assert natives == ({False} if backend is ReferenceBackend else natives)
    driver.run([driver.admit(2, PROMPT, room=6)], 2, chunk=512)
    assert stop().totals == times_.totals, "operators were timed beyond the end"


def test_the_hash_model_is_timed_by_steps_alone() -> None:
    engine = StepEngine(HashRunner(HashOptions()))
    with pytest.raises(FailedPrecondition, match="no model is loaded"):
        engine.start_profile()
    engine.load(LoadModelRequest(), lambda _stage, _share: None)
    engine.start_profile()
    assert engine.stop_profile().times is None
    with pytest.raises(FailedPrecondition):
        engine.stop_profile()


def test_totals_of_layers_are_one_line() -> None:
    layers = OperatorTimes(totals=[OperatorTotal(ATTEND, 3, 1.0), OperatorTotal(ATTEND, 4, 2.0)])
    (line,) = summarise(recording(times=layers))["operators"]
    assert (line["calls"], line["seconds"]) == (7, 3.0)


def test_a_run_is_told_as_it_was() -> None:
    assert times((ATTEND, 1.0, 2.0)).runs == [OperatorRun(ATTEND, 1.0, 2.0)]
