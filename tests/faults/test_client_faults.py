"""Smokes of the scenarios whose stimulus is a client or a clock, each a share of its run, and of their tools.

No time is asserted, nor anything that depends on how busy the machine is.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

import chaos.scenarios  # noqa: F401 - defines the scenarios
from chaos.bad_inputs import all_bad_inputs
from chaos.clocks import Clocks, variables
from chaos.fuzz import COMMANDS, PORTS, all_methods, frames
from chaos.metrics import quantile_bound
from chaos.processes import FaultDidNotHappen, identify
from chaos.runner import Plan, run_on
from chaos.scenario import SCENARIOS
from chaos.scenarios.inputs import INTERNAL_TEXT
from tests.support.chaos_meshes import NO_HARM, Meshes, harms

STREAMS = 8
SHARES = {"R13": 0.08, "R14": 0.3, "R15": 0.2, "R19": 1.0, "R20": 0.06, "R21": 0.2, "R22": 0.1}
TOKENS = {"R13": 200, "R14": 250, "R15": 40, "R19": 250, "R20": 200, "R21": 200, "R22": 300}
MUST_BE_ZERO = {
    "R13": ("leaked_tasks",),
    "R19": ("field_not_named", "wrong_code", "leaked_texts", "restarts"),
    "R20": ("unknown", "internal", "leaked_texts", "restarts"),
    "R22": ("spurious_expiries",),
}
NIGHTLY = ("R15-open loop", "R21-catastrophic regex", "R22-backward", "R14-slow")
"""Of these another variant, or another test, is in every run."""
LEAST_FAULTS = {"R13": 40, "R19": 300, "R20": 300, "R21": 300, "R21 catastrophic regex": 3, "R22": 6}


def variants() -> list[ParameterSet]:
    """Each variant of each scenario, those of one shape together."""
    found = []
    for id_ in sorted(SHARES, key=lambda each: repr(SCENARIOS[each].shape)):
        needs_compiler = pytest.mark.skipif(
            shutil.which("cc") is None, reason="a process' own clock needs a C compiler"
        )
        marks = [needs_compiler] if SCENARIOS[id_].shape.clocks else []
        for name in SCENARIOS[id_].variants:
            case = f"{id_}-{name}"
            nightly = [pytest.mark.nightly] if case in NIGHTLY else []
            found.append(pytest.param(id_, name, marks=[*marks, *nightly], id=case))
    return found


@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("id_", "variant"), variants())
async def test_the_mesh_and_other_clients_bear(id_: str, variant: str, meshes: Meshes) -> None:
    whole = SCENARIOS[id_]
    scenario = replace(whole, tokens=TOKENS[id_], variants={variant: whole.variants[variant]})
    plan = Plan(runs=1, streams=STREAMS, seed=1, share=SHARES[id_])
    report = await run_on(await meshes.of(scenario.shape), scenario, plan)
    assert report["problems"] == []
    assert harms(report) == NO_HARM
    assert report["faults_injected"] >= LEAST_FAULTS.get(f"{id_} {variant}", LEAST_FAULTS.get(id_, 1))
    figures = {name: report["figures"][name]["max"] for name in MUST_BE_ZERO.get(id_, ())}
    assert figures == dict.fromkeys(figures, 0)


def test_what_is_not_covered_is_said_in_the_report() -> None:
    assert SCENARIOS["R20"].notes == {
        "json": "its JSON is fuzzed by the contract tests of gateway/openai_http, not here"
    }
    assert SCENARIOS["R21"].notes == {}


# ---------------------------------------------------------------- bad inputs


def test_there_are_300_bad_inputs_all_different_and_each_names_a_field() -> None:
    inputs = all_bad_inputs()
    assert len(inputs) >= 300
    assert all(bad.field for bad in inputs)
    assert len({(bad.method, bad.request.SerializeToString(deterministic=True)) for bad in inputs}) == len(
        inputs
    )


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last)",
        "Unexpected <class 'google.protobuf.message.DecodeError'>",
        "KeyError: 'x'",
        "at /usr/lib/python3",
        'File "app.py", line 3',
        "<Session object at 0x7f00deadbeef>",
        "scheduler_svc.engine failed",
    ],
)
def test_internal_text_is_recognised(text: str) -> None:
    assert INTERNAL_TEXT.search(f"a message: {text}")


def test_words_for_people_are_no_internal_text() -> None:
    for text in (
        "model 'nope' is not served here",
        "plugin.contract_version is 0.9",
        "sampling.top_p is nan",
    ):
        assert not INTERNAL_TEXT.search(text)


# ---------------------------------------------------------------- fuzz


def test_frames_are_the_same_for_one_seed_and_differ_for_another() -> None:
    def made(seed: int) -> list[list[bytes]]:
        draw = random.Random(seed)
        return [frames(method, draw) for port in PORTS for method in all_methods(port)]

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_every_port_has_methods_and_orders_that_would_be_obeyed_never_parse() -> None:
    draw = random.Random(3)
    orders = set()
    for port in PORTS:
        assert all_methods(port)
        for method in all_methods(port):
            if method.descriptor.name not in COMMANDS:
                continue
            orders.add(method.descriptor.name)
            for _ in range(50):
                with pytest.raises(DecodeError):
                    GetMessageClass(method.descriptor.input_type).FromString(frames(method, draw)[0])
    assert orders == COMMANDS


def test_both_whole_and_damaged_frames_are_sent() -> None:
    draw = random.Random(4)
    (method,) = (each for each in all_methods("gateway") if each.descriptor.name == "Generate")

    def parses(frame: bytes) -> bool:
        try:
            GetMessageClass(method.descriptor.input_type).FromString(frame)
        except DecodeError:
            return False
        return True

    whole = sum(parses(frames(method, draw)[0]) for _ in range(200))
    assert 40 < whole < 180


# ---------------------------------------------------------------- clocks


TELL_TIME = "import time, sys\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_process_sees_another_wall_clock_and_the_same_monotonic_one(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    with (
        variables(clocks.environment()),
        subprocess.Popen(
            [sys.executable, "-c", TELL_TIME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def told() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("now\n")
            process.stdin.flush()
            return [float(part) for part in process.stdout.readline().split()]

        record, before = identify(process.pid), told()
        assert clocks.readings(record) == 0
        for offset_s in (3600.0, -3600.0):
            clocks.set(record, offset_s=offset_s)
            wall, monotonic = told()
            assert abs(wall - before[0] - offset_s) < 60
            assert abs(monotonic - before[1]) < 60
            assert clocks.readings(record) > 0
        process.stdin.close()


def test_a_process_without_a_clock_of_its_own_cannot_have_it_set(tmp_path: Path) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        pytest.raises(FaultDidNotHappen, match="no clock of its own"),
    ):
        Clocks(tmp_path).set(identify(process.pid), offset_s=1.0)


# ---------------------------------------------------------------- metrics


def test_a_quantile_is_bounded_by_what_a_histogram_gained() -> None:
    def page(*counts: int) -> dict[str, float]:
        edges = ("0.01", "0.05", "+Inf")
        return {f'lag_bucket{{le="{edge}"}}': count for edge, count in zip(edges, counts, strict=True)}

    assert quantile_bound(page(100, 100, 100), page(199, 200, 200), "lag", quantile=0.99) == 0.01
    assert quantile_bound(page(100, 100, 100), page(198, 200, 200), "lag", quantile=0.99) == 0.05
    assert quantile_bound(page(0, 0, 0), page(0, 0, 1), "lag", quantile=0.5) == float("inf")
    assert quantile_bound(page(1, 1, 1), page(1, 1, 1), "lag", quantile=0.5) is None
