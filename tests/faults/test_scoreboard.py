"""A smoke of every scenario: nothing lost, nothing leaked, the fault truly happened. No time is asserted.

One variant of each; scripts/nightly.sh runs them all in full counts.
"""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet

import chaos.scenarios  # noqa: F401 - defines the scenarios
from chaos.mesh import Shape
from chaos.report import Target
from chaos.runner import Plan, run_on
from chaos.scenario import SCENARIOS, Run, Scenario, all_scenarios
from tests.support.chaos_meshes import NO_HARM, Meshes, harms

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STREAMS = 8
SHARE = 0.02
"""Of what a run repeats, or of how long it lasts."""


MANY_VARIANTS = ("R7", "R9")
"""Of these test_link_faults.py runs a few."""


CLIENT_FAULTS = ("R13", "R14", "R15", "R19", "R20", "R21", "R22")
"""Of these test_client_faults.py runs each variant."""


NIGHTLY = ("R3", "R4", "R8", "R10")
"""Deaths of which R1, R2 and tests/e2e have one in every run."""


def by_shape() -> list[ParameterSet]:
    """All ids, those of one shape together."""
    chosen = [each for each in all_scenarios() if each.id not in (*MANY_VARIANTS, *CLIENT_FAULTS)]
    return [
        pytest.param(each.id, marks=[pytest.mark.nightly] if each.id in NIGHTLY else [])
        for each in sorted(chosen, key=lambda each: repr(each.shape))
    ]


def test_scenarios_come_in_the_order_of_the_scoreboard() -> None:
    numbers = [int(each.id[1:]) for each in all_scenarios()]
    assert numbers == sorted(numbers)
    assert all(each.variants for each in all_scenarios())


@pytest.mark.parametrize("id_", by_shape())
async def test_no_client_is_harmed_by(id_: str, meshes: Meshes) -> None:
    scenario = SCENARIOS[id_]
    plan = Plan(runs=1, streams=STREAMS, seed=1, share=SHARE)
    report = await run_on(await meshes.of(scenario.shape), scenario, plan)
    assert report["problems"] == []
    assert harms(report) == NO_HARM
    assert report["faults_injected"] >= 1
    assert report["runs"] == 1


async def test_a_fault_that_never_happened_fails_the_run_and_so_does_a_wrong_token(meshes: Meshes) -> None:
    async def plant(run: Run) -> None:
        history = run.clients.all[0].history
        history.expected = [*history.expected[:-1], (history.expected[-1] + 1) % 32_000]

    planted = Scenario("R99", "planted", Target(), Shape(), 50, variants={"only": plant})
    report = await run_on(await meshes.of(planted.shape), planted, Plan(runs=1, streams=2, seed=1))
    assert any("no fault was injected" in problem for problem in report["problems"])
    assert (report["faults_injected"], report["wrong"], report["passed"]) == (0, 1, False)
