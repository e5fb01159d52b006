"""benchmarks.scheduler beside vLLM: taking turns, what a speedup is, what is said where vLLM is missing."""

from __future__ import annotations

import argparse
import venv
from pathlib import Path

import pytest

from benchmarks.scheduler import (
    OWN_TOKENS,
    Turn,
    compare,
    describe_load,
    make_turns,
    measure_turns,
    speedup,
)
from benchmarks.vllm import VLLM_FOLDER, start_vllm

ARGUMENTS = argparse.Namespace(page_size=[16, 1], steps=1, vllm_steps=1)


def test_without_an_environment_the_report_says_where_it_looked_and_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with start_vllm(folder) as vllm:
        assert isinstance(vllm, str)
    assert str(folder) in vllm
    assert "--install-vllm" in vllm
    assert compare(vllm, {}, ARGUMENTS) == {
        "vllm": {"problem": vllm},
        "vllm_plan_ms": {},
        "speedup_vs_vllm": {},
    }


def test_an_environment_that_lacks_vllm_says_what_could_not_be_imported(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    with start_vllm(tmp_path / "empty") as vllm:
        assert isinstance(vllm, str)
    assert "No module named 'vllm'" in vllm


def test_without_vllm_all_loads_of_ours_are_measured_all_the_same() -> None:
    names = {name for turn in make_turns(ARGUMENTS, None) for name in turn}
    assert {"16/1", "16/64", "16/1024", "16/4096", "1/1024", "16/10M cached"} <= names
    assert not any(name.startswith("vllm/") for name in names)


def test_ours_and_theirs_take_turns_and_the_second_begins_every_other_round() -> None:
    order: list[str] = []

    def note(name: str) -> dict[str, float]:
        order.append(name)
        return {"p50": float(len(order))}

    turn: Turn = {"ours": lambda: note("ours"), "theirs": lambda: note("theirs")}
    rounds = measure_turns([turn], 3)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert rounds["ours"] == [{"p50": 1.0}, {"p50": 4.0}, {"p50": 5.0}]


def test_a_speedup_is_the_median_of_the_rounds_own_ratios() -> None:
    ours = [{"p50": 1.0}, {"p50": 10.0}, {"p50": 2.0}]
    theirs = [{"p50": 3.0}, {"p50": 20.0}, {"p50": 10.0}]
    assert speedup(ours, theirs) == 3.0  # 3, 2 and 5; the ratio of the medians would be 5.


@pytest.mark.nightly
@pytest.mark.skipif(not VLLM_FOLDER.exists(), reason="python -m benchmarks.scheduler --install-vllm")
def test_vllm_replaces_a_twentieth_in_a_step_and_finds_their_shared_prefix_cached() -> None:
    with start_vllm(VLLM_FOLDER) as vllm:
        assert not isinstance(vllm, str), vllm
        figures = vllm.measure(describe_load(40, page_size=16, steps=20))
    assert figures["running"] == 40
    assert figures["ended_per_step"] == 2
    assert figures["prefill_tokens_per_request"] == OWN_TOKENS
    assert 0 < figures["p50"] <= figures["p99"]
