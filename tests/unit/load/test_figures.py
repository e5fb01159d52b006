"""TTFT, TPOT, ITL, goodput and the rest, on samples made by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from meshkit.load.figures import describe_samples, parse_goodput, percentile, summarise, token_gaps_s
from meshkit.load.plot import check_plot, save_plot, shares
from meshkit.load.sample import Sample
from meshkit.load.targets import Received, Usage


def a_sample(
    *messages: tuple[float, int | None],
    sent_s: float = 10.0,
    ended_s: float | None = None,
    usage: Usage | None = None,
    asked: int = 1,
) -> Sample:
    """messages: (receipt, tokens)."""
    sample = Sample(asked, sent_s=sent_s, known_prompt_tokens=5)
    for at_s, tokens in messages:
        sample.take(Received(tokens, None if tokens is None else (0,) * tokens, "x", None), at_s)
    if usage is not None:
        sample.take(Received(0, (), "", usage), messages[-1][0] if messages else sent_s)
    sample.ended_s = ended_s if ended_s is not None else max([sent_s, *sample.times_s])
    return sample


def test_the_first_token_is_no_part_of_tpot() -> None:
    sample = a_sample((10.5, 1), (10.6, 1), (10.9, 1))
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.tpot_s == pytest.approx(0.4 / 2)
    assert sample.e2e_s == pytest.approx(0.9)


def test_a_message_of_several_tokens_is_so_many_gaps() -> None:
    sample = a_sample((10.5, 2), (10.8, 3), (10.9, 1))
    assert token_gaps_s([sample]) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert sample.tpot_s == pytest.approx(0.4 / 5)


def test_one_token_has_a_ttft_and_no_tpot() -> None:
    report = describe_samples([a_sample((10.5, 1))])
    assert report["ttft_ms"]["p50"] == pytest.approx(500)
    assert report["tpot_ms"] is None
    assert report["itl_ms"] is None


def test_no_token_at_all_has_no_times() -> None:
    report = describe_samples([a_sample(ended_s=11.0)])
    assert report["ttft_ms"] is None
    assert report["tokens_per_message"] is None
    assert report["client_cpu_us_per_token"] is None
    assert report["e2e_ms"]["p50"] == pytest.approx(1000)


def test_unknown_counts_are_by_usage_and_make_itl_one_by_message() -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=8)
    report = describe_samples([a_sample((10.5, None), (10.9, None), usage=usage)])
    assert report["output_tokens"] == 8
    assert report["prompt_tokens"] == 7
    assert report["itl_is_by"] == "message"
    assert report["itl_ms"]["mean"] == pytest.approx(400)
    assert report["tpot_ms"]["mean"] == pytest.approx(400 / 7, abs=1e-3)


def test_unknown_counts_without_usage_are_one_each_and_said_to_be_unsure() -> None:
    report = describe_samples([a_sample((10.5, None), (10.9, None))])
    assert (report["output_tokens"], report["itl_is_by"]) == (2, "message")


def test_rates_are_over_the_whole_run_and_of_requests_that_ended_well() -> None:
    failed = a_sample((10.5, 1), ended_s=14.0)
    failed.fail(ResourceExhausted("full", reason="QUEUE_FULL"))
    report = describe_samples([a_sample((10.5, 3)), a_sample((12.0, 5), sent_s=11.0), failed])
    assert report["elapsed_s"] == 4.0
    assert report["output_tokens_per_s"] == 2.0
    assert report["total_tokens_per_s"] == (8 + 10) / 4
    assert report["requests_per_s"] == 0.5
    assert (report["requests"], report["completed"], report["failed"]) == (3, 2, 1)
    assert report["errors"] == {"RESOURCE_EXHAUSTED/QUEUE_FULL": {"count": 1, "example": "full"}}
    assert describe_samples([failed], elapsed_s=2.0)["output_tokens_per_s"] == 0


def test_cached_share_is_of_all_prompts_and_none_where_one_server_is_silent() -> None:
    told = [a_sample((11.0, 1), usage=Usage(10, 1, cached)) for cached in (0, 8)]
    assert describe_samples(told)["cached_share"] == 0.4
    silent = a_sample((11.0, 1), usage=Usage(10, 1, None))
    assert describe_samples([*told, silent])["cached_share"] is None


def test_short_answers_are_counted() -> None:
    report = describe_samples([a_sample((11.0, 3), asked=4), a_sample((11.0, 4), asked=4)])
    assert report["shorter_than_asked"] == 1


def test_cpu_is_spread_over_the_tokens() -> None:
    samples = [a_sample((11.0, 50)), a_sample((11.0, 50))]
    for index, sample in enumerate(samples):
        sample.sent_cpu_s, sample.ended_cpu_s = 3.0 + index, 5.0 + index
    assert describe_samples(samples)["client_cpu_us_per_token"] == pytest.approx(3e6 / 100)


def test_goodput_counts_requests_that_meet_every_bound() -> None:
    samples = [
        a_sample((10.1, 1), (10.2, 1)),
        a_sample((10.6, 1), (10.7, 1)),
        a_sample((10.1, 1), (10.9, 1)),
        a_sample((10.1, 1)),
        a_sample(ended_s=12.0),
    ]
    report = describe_samples(samples, elapsed_s=2.0, goodput={"ttft": 500, "tpot": 150})
    assert report["goodput"] == {
        "bounds_ms": {"ttft": 500, "tpot": 150}, "requests": 2, "requests_per_s": 1.0
    }  # fmt: skip
    assert describe_samples(samples, goodput={"e2e": 150})["goodput"]["requests"] == 1


@pytest.mark.parametrize("words", [["ttft:500", "tpot:50"], ["ttft:500 tpot:50"]])
def test_bounds_are_read_from_one_word_or_several(words: list[str]) -> None:
    assert parse_goodput(words) == {"ttft": 500, "tpot": 50}


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:fast", "itl:5", ":5", "ttft:0", "ttft:-1", "ttft:nan"]
)
def test_what_is_no_bound_is_refused(word: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_goodput([word])
    assert refused.value.field == "--goodput"


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, math.nan, math.inf])
def test_an_elapsed_time_that_is_none_is_refused(elapsed_s: float) -> None:
    with pytest.raises(InvalidArgument, match="elapsed_s"):
        describe_samples([a_sample((11.0, 1))], elapsed_s=elapsed_s)


def test_no_samples_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="none"):
        describe_samples([])


@given(
    st.lists(st.floats(min_value=0, max_value=1e3), min_size=1, max_size=60),
    st.floats(min_value=0, max_value=100),
)
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.percentile(values, share)), abs=1e-9)


def test_a_summary_leaves_out_what_is_not_known() -> None:
    assert summarise([None, None]) is None
    assert summarise([0.1, None, 0.3]) == {"mean": 200, "p50": 200, "p90": 280, "p95": 290, "p99": 298}


def test_a_plot_has_what_there_is_in_order() -> None:
    failed = a_sample((30.0, 1))
    failed.fail(ResourceExhausted("full"))
    drawn = shares([a_sample((10.5, 1), (10.7, 1)), a_sample((10.2, 1)), failed])
    assert drawn["TTFT"] == pytest.approx([200, 500])
    assert drawn["ITL"] == pytest.approx([200])
    assert drawn["E2E"] == pytest.approx([200, 700])
    assert shares([failed]) == {}


def test_a_plot_is_drawn_and_another_suffix_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plots" / "run.svg"
    check_plot(file)
    save_plot(file, [a_sample((10.5, 1), (10.7, 1)), a_sample((10.2, 1))], title="the title")
    drawn = file.read_text()
    assert all(f"<!-- {word} -->" in drawn for word in ("the title", "TTFT", "E2E"))
    with pytest.raises(InvalidArgument, match=r"\.svg or \.png"):
        check_plot(tmp_path / "run.gif")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(FailedPrecondition, match=r"chipmesh\[bench\]"):
        check_plot(Path("run.svg"))
