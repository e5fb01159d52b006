"""The simulator: times that can be worked out by hand, weights that are kept, traces that are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.app import main
from meshkit.errors import InvalidArgument
from scheduler_svc.simulation.fleet import Fleet
from scheduler_svc.simulation.report import summarise
from scheduler_svc.simulation.simulator import Outcome, Simulation
from scheduler_svc.simulation.trace import (
    BLOCK_TOKENS,
    Prompts,
    SyntheticTrace,
    TracedRequest,
    digest,
    read_trace,
)

CHIP = {"prefill_tokens_per_s": 1000, "decode_ms": 10, "kv_tokens": 10_000}


def fleet_of(*groups: dict[str, Any]) -> Fleet:
    return Fleet.model_validate({"groups": [{"chip": CHIP, **group} for group in groups]})


def request(at_s: float, inputs: int, outputs: int, *blocks: int) -> TracedRequest:
    return TracedRequest(at_s, inputs, outputs, blocks)


def run(fleet: Fleet, *requests: TracedRequest) -> Outcome:
    return Simulation(fleet).run(requests)


def test_a_request_alone_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    outcome = run(fleet_of({"name": "g", "replicas": 1}), request(1.0, 100, 5))
    (record,) = outcome.records
    assert record.first_token_s == pytest.approx(1.1)
    assert record.last_token_s == pytest.approx(1.1 + 4 * 0.010)
    assert record.output_tokens == 5
    assert outcome.busy_s["g"] == pytest.approx(0.14)


def test_batch_and_context_cost_what_the_chip_says() -> None:
    chip = {**CHIP, "decode_ms_per_request": 1.0, "decode_us_per_context_token": 100.0, "step_ms": 2.0}
    outcome = run(
        fleet_of({"name": "g", "replicas": 1, "chip": chip}), request(0.0, 10, 2), request(0.0, 20, 2)
    )
    # Both prompts enter at once or one after the other, but their only decode step is shared.
    first, second = outcome.records
    assert first.output_tokens == second.output_tokens == 2
    alone = run(fleet_of({"name": "g", "replicas": 1, "chip": chip}), request(0.0, 10, 2))
    step = 0.002 + 0.010 + 0.001 + 10 * 100e-6
    assert alone.end_s == pytest.approx(0.002 + 0.010 + step)


def test_a_prompt_seen_before_is_found_in_the_cache() -> None:
    outcome = run(
        fleet_of({"name": "g", "replicas": 1}),
        request(0.0, 2 * BLOCK_TOKENS, 2, 1, 2),
        request(10.0, 2 * BLOCK_TOKENS, 2, 1, 3),
        request(20.0, BLOCK_TOKENS, 2, 9),
    )
    assert [record.cached_tokens for record in outcome.records] == [0, BLOCK_TOKENS, 0]


def test_a_prefix_draws_requests_to_the_replica_that_has_it() -> None:
    requests = [request(float(number), BLOCK_TOKENS + 50, 2, number % 3) for number in range(12)]
    outcome = run(fleet_of({"name": "g", "replicas": 3}), *requests)
    assert sum(record.cached_tokens > 0 for record in outcome.records) == 9


def test_weights_split_requests_and_change_nothing_about_their_tokens() -> None:
    trace = list(SyntheticTrace(requests=1000, rate=200, own_tokens=20, shared=0.0).generate())
    fleet = fleet_of({"name": "a", "replicas": 4, "weight": 80}, {"name": "b", "replicas": 2, "weight": 20})
    summary = summarise(Simulation(fleet).run(trace), fleet, ttft_bound_s=1, tpot_bound_s=1)
    counts = {name: figures["requests"] for name, figures in summary["groups"].items()}
    assert counts == {"a": 800, "b": 200}
    assert summary["all"]["output_tokens"] == sum(each.output_tokens for each in trace)
    assert summary["all"]["failed"] == 0


def test_the_same_input_gives_the_same_outcome() -> None:
    trace = list(SyntheticTrace(requests=200, rate=50).generate())
    fleet = fleet_of({"name": "g", "replicas": 2})
    assert Simulation(fleet).run(trace).records == Simulation(fleet).run(trace).records


def test_a_request_that_no_chip_can_hold_fails_alone() -> None:
    outcome = run(fleet_of({"name": "g", "replicas": 1}), request(0.0, 20_000, 2), request(0.0, 10, 2))
    assert "20000" in outcome.records[0].failure
    assert outcome.records[1].output_tokens == 2


def test_equal_blocks_give_equal_tokens_and_others_differ() -> None:
    prompts = Prompts()
    one, other = (prompts.tokens(request(at, 600, 1, 1, block)) for at, block in ((0.0, 2), (1.0, 3)))
    assert one[:BLOCK_TOKENS] == other[:BLOCK_TOKENS]
    assert one[BLOCK_TOKENS] != other[BLOCK_TOKENS]
    assert len(one) == 600


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2, column"),
        ('{"timestamp": 1, "input_length": 5}', "output_length"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1}', "line 2"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "at least 1"),
        ("[]", "line 2"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line + "\n"
    )
    with pytest.raises(InvalidArgument, match=said) as caught:
        read_trace(file)
    assert caught.value.field == "--trace"


def test_a_trace_by_numbers_is_refused_where_other_requests_come_out(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    numbers = {"requests": 10, "rate": 5.0}
    made = list(SyntheticTrace.model_validate(numbers).generate())
    file.write_text(json.dumps({**numbers, "sha256": digest(made)}))
    assert read_trace(file) == made
    file.write_text(json.dumps({**numbers, "seed": 1, "sha256": digest(made)}))
    with pytest.raises(InvalidArgument, match="sha256"):
        read_trace(file)


def test_the_command_prints_figures_by_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps({"groups": [{"name": "g", "replicas": 2, "chip": CHIP}]}))
    words = ["simulate", "--fleet", str(fleet), "--requests", "50"]
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["groups"]["g"]["requests"] == summary["all"]["requests"] == 50
    assert summary["all"]["ttft_ms"]["p50"] > 0
    assert main(words) == 0
    assert "goodput" in capsys.readouterr().out


def test_a_wrong_fleet_is_refused_with_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps({"groups": [{"name": "g", "replicas": 0, "chip": CHIP}]}))
    assert main(["simulate", "--fleet", str(fleet)]) == 2
    assert "replicas" in capsys.readouterr().err
