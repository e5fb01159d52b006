"""The arithmetic of `benchmarks.overhead` and `mesh`."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.mesh import make_load
from benchmarks.overhead import median_of_buckets
from meshkit.load import random_tokens

ARGUMENTS = argparse.Namespace(prompt_tokens=20, output_tokens=4)


def test_no_two_loads_of_a_run_share_a_prompt() -> None:
    prompts: set[tuple[int, ...] | None] = set()
    asked = 0
    for number in range(-1, 3):
        for concurrency in (1, 8, 32):
            load = make_load(ARGUMENTS, concurrency, number=number)
            made = random_tokens(
                load.requests, prompt_tokens=20, output_tokens=4, vocab_size=49_152, seed=load.seed
            )
            prompts |= {request.token_ids for request in made}
            asked += load.requests
    assert len(prompts) == asked


def test_a_measured_load_has_five_requests_a_client_and_a_warm_up_one() -> None:
    assert make_load(ARGUMENTS, 8, number=0).requests == 40
    assert make_load(ARGUMENTS, 8, number=-1).requests == 8


def test_the_median_of_a_histogram_lies_within_its_bucket_and_counts_only_what_came_between() -> None:
    before = {0.1: 100.0, 0.2: 100.0, float("inf"): 100.0}
    after = {0.1: 101.0, 0.2: 104.0, float("inf"): 104.0}
    assert median_of_buckets(before, after) == pytest.approx(0.1 + 0.1 / 3)
    assert median_of_buckets({}, {0.1: 2.0, float("inf"): 2.0}) == pytest.approx(0.05)


def test_a_histogram_without_news_has_no_median() -> None:
    with pytest.raises(ValueError, match="no step came"):
        median_of_buckets({0.1: 5.0}, {0.1: 5.0})
