"""What `python -m benchmarks.prefix` makes of its runs."""

from __future__ import annotations

import pytest

from benchmarks import prefix
from benchmarks.prefix import LLAMA, WITH, WITHOUT, WORKLOADS, Run, compare, summarise_run
from meshkit.load import Received, Sample, Usage


def a_run(elapsed_s: float, *answers: tuple[int, ...] | None) -> dict[str, Run]:
    return {"multi_turn": Run({"elapsed_s": elapsed_s}, answers)}


def test_speedup_is_the_median_over_rounds_of_the_pairs() -> None:
    runs = {
        WITH: [a_run(1.0, (1, 2), (3,)), a_run(2.0, (1,), (2,)), a_run(1.0, (1,), (2,))],
        WITHOUT: [a_run(3.0, (1, 2), (4,)), a_run(2.0, (1,), (2,)), a_run(9.0, (1,), (2,))],
    }
    told = compare("multi_turn", runs, over=WITHOUT)
    assert told["speedups"] == [3.0, 1.0, 9.0]
    assert told["speedup"] == 3.0
    assert told["same_answers"] == pytest.approx(5 / 6, abs=1e-4)
    assert [run["elapsed_s"] for run in told[WITHOUT]] == [3.0, 2.0, 9.0]


def test_answers_without_ids_are_not_compared() -> None:
    runs = {WITH: [a_run(1.0, (1, 2))], LLAMA: [a_run(5.0, None)]}
    told = compare("multi_turn", runs, over=LLAMA)
    assert (told["speedup"], told["same_answers"]) == (5.0, None)


def a_sample(tokens: int, *, asked: int) -> Sample:
    sample = Sample(asked, sent_s=1.0, ended_s=2.0)
    sample.take(Received(tokens, (7,) * tokens, "", None), 1.5)
    sample.take(Received(0, (), "", Usage(9, tokens, 4)), 2.0)
    return sample


def test_a_run_has_its_figures_and_answers() -> None:
    run = summarise_run([a_sample(3, asked=3)])
    assert run.answers == ((7, 7, 7),)
    assert run.figures["ttft_p50_ms"] == 500
    assert (run.figures["cached_tokens"], run.figures["prompt_tokens"]) == (4, 9)


def test_short_answers_and_failures_end_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="1 answered short"):
        summarise_run([a_sample(3, asked=4)])
    failed = a_sample(3, asked=3)
    failed.error, failed.error_message = "UNAVAILABLE", "gone"
    with pytest.raises(SystemExit, match=r"1 requests failed .*gone"):
        summarise_run([failed])


def test_the_workloads_are_those_of_the_goal() -> None:
    big = WORKLOADS["shared_prefix"].make(1 << 20, 1)
    small = WORKLOADS["shared_prefix_512"].make(1 << 20, 1)
    for requests, count, prefix_tokens in ((big, 64, 1024), (small, 32, 512)):
        prompts = [each.token_ids or () for each in requests]
        assert len(prompts) == count
        assert {len(prompt) for prompt in prompts} == {prefix_tokens + 32}
        assert len({prompt[:prefix_tokens] for prompt in prompts}) == 1
        assert {each.max_tokens for each in requests} == {16}
    assert (WORKLOADS["shared_prefix"].concurrency, WORKLOADS["shared_prefix_512"].concurrency) == (16, 8)


def test_no_two_runs_have_a_prompt_in_common() -> None:
    seen: set[tuple[int, ...]] = set()
    for round_number in range(3):
        for name, workload in WORKLOADS.items():
            prompts = {
                (each.token_ids or ())[:16]
                for each in workload.make(1 << 20, prefix._seed(round_number, name))
            }
            assert not prompts & seen
            seen |= prompts
