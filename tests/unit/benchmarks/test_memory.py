"""Growth is a slope with a band that is honest about its samples; footprints are those of real processes."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import (
    OBJECTS_TRACE,
    Footprint,
    describe_growth,
    describe_stage,
    fit_growth,
    most_grown,
    parse_rollup,
    read_footprint,
    t_quantile,
    take_lines,
)
from benchmarks.memory import main as measure_memory
from tests.support.hash_model import write_hash_model

ROLLUP = """55d0a000-7ffd1000 ---p 00000000 00:00 0                          [rollup]
Rss:              102400 kB
Pss:               51200 kB
Pss_Anon:          40960 kB
"""


def noisy(slope: float, *, noise: float, count: int = 60, carry: float = 0.0) -> list[tuple[float, float]]:
    """One sample a second of a line; carry: how much of its noise a sample takes on from the one before."""
    draw = random.Random(7)
    points, error = [], 0.0
    for second in range(count):
        error = carry * error + draw.gauss(0, noise)
        points.append((float(second), 100 + slope * second + error))
    return points


def test_a_straight_line_grows_by_its_slope_and_has_no_band() -> None:
    growth = fit_growth(noisy(0.01, noise=0.0))
    assert growth is not None
    assert growth.mib_per_hour == pytest.approx(36.0)
    assert growth.low == pytest.approx(36.0)
    assert growth.high == pytest.approx(36.0)


def test_the_band_of_a_flat_noisy_line_holds_zero_and_that_of_a_rising_one_its_slope() -> None:
    flat, rising = fit_growth(noisy(0.0, noise=0.5)), fit_growth(noisy(0.1, noise=0.5))
    assert flat is not None
    assert rising is not None
    assert flat.low < 0 < flat.high
    assert 0 < rising.low < 360 < rising.high


def test_samples_that_follow_their_neighbours_widen_the_band() -> None:
    alone, alike = fit_growth(noisy(0.0, noise=0.5)), fit_growth(noisy(0.0, noise=0.5, carry=0.9))
    assert alone is not None
    assert alike is not None
    assert alike.high - alike.low > 3 * (alone.high - alone.low)


def test_too_few_samples_say_nothing_about_growth() -> None:
    assert fit_growth(noisy(0.1, noise=0.1, count=3)) is None
    assert fit_growth([(1.0, 5.0)] * 5) is None


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.776), (10, 2.228), (30, 2.042), (1000, 1.962)])
def test_the_quantile_is_that_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=0.01)


def test_growth_is_told_by_requests_too() -> None:
    seen = [Footprint(float(second), 50 + 0.001 * second, 25.0) for second in range(20)]
    growth = describe_growth(seen, requests_per_s=10.0)
    assert growth is not None
    assert growth["mib_per_hour"] == pytest.approx(3.6)
    assert growth["kib_per_1000_requests"] == pytest.approx(102.4)
    assert growth["grows"]
    assert describe_growth(seen[:2], requests_per_s=10.0) is None


def test_a_stage_is_its_medians_and_its_peak() -> None:
    seen = [Footprint(0.0, 10.0, 5.0), Footprint(1.0, 30.0, 6.0), Footprint(2.0, 20.0, 7.0)]
    assert describe_stage(seen) == {"rss_mib": 20.0, "pss_mib": 6.0, "peak_rss_mib": 30.0}
    assert describe_stage([]) == {}


def test_a_rollup_is_read_in_mib_and_a_process_that_has_ended_is_told() -> None:
    assert parse_rollup(ROLLUP) == (100.0, 50.0)
    rss, pss = read_footprint(os.getpid())
    assert 10 < pss <= rss
    with pytest.raises(ProcessLookupError):
        read_footprint(2**22 + 1)


def test_only_lines_that_hold_more_than_before_have_grown() -> None:
    assert most_grown({"a.py:1": 1024, "b.py:2": 4096}, {"a.py:1": 3072, "b.py:2": 1024, "c.py:3": 512}) == {
        "a.py:1": 2.0, "c.py:3": 0.5
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_short_watch_of_a_real_mesh_evicts_and_tells_of_every_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_hash_model(tmp_path)
    measure_memory([
        "--backend", "hash", "--model", str(model), "--load-format", "dummy", "--cache-tokens", "1024",
        "--seconds", "4", "--idle-seconds", "1", "--interval", "0.2", "--concurrency", "4",
        "--json", "--even-if-busy",
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert set(report["services"]) == {"launcher", "scheduler", "gateway", "worker-0", "worker-0-executor"}
    for service in report["services"].values():
        for stage in ("idle", "load", "after"):
            assert 10 < service[stage]["pss_mib"] <= service[stage]["rss_mib"] < math.inf
        assert (
            service["growth"]["band"][0] <= service["growth"]["mib_per_hour"] <= service["growth"]["band"][1]
        )
    assert report["evicted_tokens"]["until_end"] > 0, "the load does not fill the cache"
    assert report["requests"] > 4
    assert report["grown_kib"] == {}


@pytest.mark.timeout(60)
def test_a_process_tells_the_lines_that_hold_its_memory(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OBJECTS_TRACE, encoding="utf-8")
    holder = tmp_path / "holder.py"
    holder.write_text("held = [bytearray(1000) for _ in range(1000)]\nprint(flush=True)\ninput()\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CHIPMESH_OBJECTS_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(holder)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # It holds what it will.
        lines = take_lines({"holder": process.pid}, tmp_path)["holder"]
        process.communicate(b"\n")
    assert lines[f"{holder}:1"] > 1_000_000
