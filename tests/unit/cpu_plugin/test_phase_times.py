"""The step kernel's own clocks: what they tell, and that they change nothing."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from plugins.cpu.native.library import PHASES
from plugins.sdk.step_program import A8
from plugins.sdk.timing import CLASSES
from tests.unit.cpu_plugin.decoder_samples import SHAPE, Session, instruction_sets, random_weights, start

PROMPT = [5, 17, 80, 3, 41, 9, 60, 22, 7, 11, 90, 33, 4] * 4
PAGES = list(range(20))


def steps(session: Session) -> list[bytes]:
    """Logits of a prompt, then of single tokens, as bits: many rows and few ones are computed differently."""
    made = [session.run([(PROMPT, 0, PAGES)], every=True).logits.tobytes()]
    for position in range(len(PROMPT), len(PROMPT) + 4):
        made.append(session.run([([7], position, PAGES)]).logits.tobytes())
    return made


@pytest.mark.parametrize(("encoding", "quantization"), [("F32", ""), ("Q4_1", ""), ("Q4_1", A8)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_step_has_the_same_bits_with_and_without_clocks(
    instruction_set: str, threads: int, encoding: str, quantization: str
) -> None:
    session = start(
        random_weights(encoding=encoding),
        threads=threads,
        instruction_set=instruction_set,
        quantization=quantization,
    )
    plain = steps(session)
    stop = session.program.start_timing(most_runs=1000)
    assert steps(session) == plain
    assert stop().totals
    assert steps(session) == plain


def test_phases_fill_the_time_of_the_steps_one_after_the_other() -> None:
    session = start(random_weights(), threads=2)
    stop = session.program.start_timing(most_runs=10_000)
    begun = time.monotonic()
    steps(session)
    ended = time.monotonic()
    times = stop()
    runs = times.runs
    assert begun <= runs[0].begin_s
    assert runs[-1].begin_s + runs[-1].seconds <= ended
    for run, following in itertools.pairwise(runs):
        assert run.seconds >= 0
        assert following.begin_s >= run.begin_s + run.seconds - 1e-9
    by_name = {total.operator.name: total for total in times.totals}
    assert by_name["qkv_proj"].calls == by_name["attention"].calls == 5 * SHAPE.layers
    assert by_name["lm_head"].calls == 5
    assert sum(total.calls for total in times.totals) == len(runs)
    assert np.isclose(
        sum(total.seconds for total in times.totals), sum(run.seconds for run in runs), rtol=1e-6
    )


def test_runs_are_told_up_to_a_bound_and_sums_beyond_it() -> None:
    session = start(random_weights())
    stop = session.program.start_timing(most_runs=7)
    steps(session)
    times = stop()
    assert len(times.runs) == 7
    assert sum(total.calls for total in times.totals) > 7


def test_a_timing_begins_with_nothing_and_ends_for_good() -> None:
    session = start(random_weights())
    session.program.start_timing(most_runs=10)()
    steps(session)
    stop = session.program.start_timing(most_runs=10)
    times = stop()
    assert (list(times.totals), list(times.runs)) == ([], [])


def test_every_phase_has_a_name_and_a_class_that_profiles_know() -> None:
    session = start(random_weights())
    stop = session.program.start_timing(most_runs=0)
    steps(session)
    totals = stop().totals
    assert {total.operator.kind for total in totals} <= set(CLASSES)
    assert all(total.operator.native and "native step kernel" in total.operator.program for total in totals)
    # No draws were asked for, and no row is rounded to int8 here.
    assert len(totals) == len(PHASES) - 2
