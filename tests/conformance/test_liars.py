"""The kit is worth what it catches: every planted liar fails, by the name of its check and of its fault."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from plugins.conformance import collective_sums
from plugins.conformance.checks_collectives import run_ranks
from plugins.conformance.collective_rank import check_rank
from plugins.conformance.report import Fault, Report, Status
from plugins.sdk.backend import Backend
from plugins.sdk.capabilities import CapabilityReport, OperatorCapability
from plugins.sdk.collectives import Collectives
from plugins.sdk.operators import OperatorSet
from tests.conformance import liars
from tests.conformance.liars import PlantedBackend

Check = Callable[..., Report]

OPERATOR_LIARS = [
    (liars.WrongResult, "silu_mul", Fault.WRONG_RESULT),
    (liars.WrongRow, "rotary", Fault.WRONG_RESULT),
    (liars.ReadsTooFar, "attention_decode", Fault.WRONG_RESULT),
    (liars.LastOfEquals, "argmax", Fault.WRONG_RESULT),
    (liars.IgnoresTopK, "sample", Fault.WRONG_RESULT),
    (liars.NotImplementedYet, "rms_norm", Fault.DECLARED_BUT_MISSING),
    (liars.NotANumber, "rms_norm", Fault.NON_FINITE),
    (liars.WrongDtype, "rms_norm", Fault.WRONG_FORM),
    (liars.WritesNextCell, "write_kv", Fault.OUT_OF_BOUNDS_WRITE),
    (liars.WritesBehindCache, "write_kv", Fault.OUT_OF_BOUNDS_WRITE),
    (liars.ShortAccumulation, "linear", Fault.WRONG_ACCUMULATION),
    (liars.NonDeterministic, "add_rms_norm", Fault.NON_DETERMINISTIC),
    (liars.OverwritesInput, "silu_mul", Fault.INPUT_OVERWRITTEN),
    (liars.WithoutEps, "rms_norm", Fault.WRONG_RESULT),
    (liars.WithoutEps, "add_rms_norm", Fault.WRONG_RESULT),
    (liars.TurnsTheValue, "qkv_rotary", Fault.WRONG_RESULT),
    (liars.NeverNormalises, "moe_route", Fault.WRONG_RESULT),
    (liars.LastExpertOfEquals, "moe_route", Fault.WRONG_RESULT),
    (liars.ExpertsOutOfOrder, "moe_experts", Fault.WRONG_RESULT),
    (liars.UnalignedExperts, "moe_experts", Fault.WRONG_RESULT),
    (liars.UpFirst, "moe_experts", Fault.WRONG_RESULT),
    (liars.ScaleByInput, "linear_w8a8", Fault.WRONG_RESULT),
    (liars.ScaleOff, "linear_w8a8", Fault.WRONG_RESULT),
    (liars.Truncates, "linear_w8a8", Fault.WRONG_RESULT),
    (liars.OneScaleForAll, "linear_w8a8", Fault.WRONG_RESULT),
    (liars.ZeroPointOff, "linear_w4a16", Fault.WRONG_RESULT),
    (liars.HighNibbleFirst, "linear_w4a16", Fault.WRONG_RESULT),
    (liars.GroupScaleOff, "linear_w4a16", Fault.WRONG_RESULT),
    (liars.ExpertsShareScales, "moe_experts_w8a8", Fault.WRONG_RESULT),
    (liars.ExpertsScaleOff, "moe_experts_w8a8", Fault.WRONG_RESULT),
    (liars.ExpertsWithoutZeroPoints, "moe_experts_w4a16", Fault.WRONG_RESULT),
]


def _planted(operators: type[OperatorSet]) -> Callable[[], Backend]:
    if operators is liars.ShortAccumulation:
        return partial(PlantedBackend, operators=operators, memory=liars.PlainMemory)
    return partial(PlantedBackend, operators=operators)


@pytest.mark.parametrize(
    ("operators", "name", "fault"),
    OPERATOR_LIARS,
    ids=[f"{liar.__name__}-{name}" for liar, name, _ in OPERATOR_LIARS],
)
def test_an_operator_that_lies_fails_by_name(
    check: Check, operators: type[OperatorSet], name: str, fault: Fault
) -> None:
    report = check(_planted(operators), f"operators/{name}/")
    assert {failure.fault for failure in report.failures} == {fault}
    assert all(failure.name.startswith(f"operators/{name}/") for failure in report.failures)


@pytest.mark.parametrize(
    "operators",
    [
        liars.ShortAccumulation,
        liars.OverwritesInput,
        liars.NonDeterministic,
        liars.ScaleOff,
        liars.GroupScaleOff,
        liars.ExpertsScaleOff,
    ],
)
def test_a_liar_is_caught_in_every_dtype(check: Check, operators: type[OperatorSet]) -> None:
    name = next(name for liar, name, _ in OPERATOR_LIARS if liar is operators)
    report = check(_planted(operators), f"operators/{name}/")
    assert {failure.name.split("/")[2] for failure in report.failures} == {"float32", "bfloat16"}


def test_cells_of_integers_have_to_be_the_nearest(check: Check) -> None:
    """Caches in what a chip does not compute in are checked beside those in its own dtypes."""
    report = check(partial(PlantedBackend, operators=liars.TruncatesCells), "operators/write_kv/")
    assert {failure.name.split("/")[-1] for failure in report.failures} == {"int8"}
    assert {failure.fault for failure in report.failures} == {Fault.WRONG_RESULT}
    checked = {result.name.split("/")[-1] for result in report.results}
    assert {"float8_e4m3fn", "float8_e5m2", "int8"} <= checked


def test_a_liar_does_not_taint_the_operators_beside_it(check: Check) -> None:
    report = check(partial(PlantedBackend, operators=liars.WrongResult), "operators/")
    assert {failure.name.split("/")[1] for failure in report.failures} == {"silu_mul"}


@pytest.mark.parametrize("name", ["write_kv", "attention_prefill", "attention_decode"])
def test_caches_lie_in_memory_as_the_chip_has_them(check: Check, name: str) -> None:
    report = check(partial(PlantedBackend, operators=liars.HeadsBeforeTokens), f"operators/{name}/")
    assert report.results
    assert report.failures == []


def test_a_write_behind_a_cache_of_another_order_is_found(check: Check) -> None:
    make = partial(PlantedBackend, operators=liars.HeadsBeforeTokensWritesBehind)
    report = check(make, "operators/write_kv/")
    assert {result.fault for result in report.results} == {Fault.OUT_OF_BOUNDS_WRITE}


def _limited(report: CapabilityReport) -> CapabilityReport:
    """Heads of 64 only, pages of 16 only."""
    limited = [replace(entry, constraints=("D == 64",)) if entry.name == "attention_prefill" else entry
               for entry in report.operators]  # fmt: skip
    return replace(report, operators=limited, page_sizes_tokens=(16,))


def test_shape_classes_outside_the_declared_constraints_are_skipped(check: Check) -> None:
    make = partial(PlantedBackend, report=_limited)
    for name, outside in (
        ("attention_prefill", {"gqa8_d128", "odd", "page64"}),
        ("write_kv", {"odd", "page64"}),
    ):
        report = check(make, f"operators/{name}/")
        skipped = [result for result in report.results if result.status is Status.SKIP_UNDECLARED]
        assert {result.name.split("/")[3] for result in skipped} == outside
        assert not outside & {shape for operator, _, shape in report.coverage.declared if operator == name}


def test_declared_short_accumulation_is_no_lie(check: Check) -> None:
    honest = partial(
        PlantedBackend,
        operators=liars.ShortAccumulation,
        memory=liars.PlainMemory,
        report=lambda report: replace(report, accumulation_dtype="bfloat16"),
    )
    assert check(honest, "operators/linear/").failures == []


@pytest.mark.parametrize(
    ("operators", "names"),
    [
        (liars.HalvesAway, ("linear_w8a8", "moe_experts_w8a8")),
        (liars.WeightsInTheDtype, ("linear_w4a16", "moe_experts_w4a16")),
    ],
)
def test_what_a_kernel_may_do_otherwise_is_no_lie(
    check: Check, operators: type[OperatorSet], names: tuple[str, ...]
) -> None:
    for name in names:
        report = check(partial(PlantedBackend, operators=operators), f"operators/{name}/")
        assert report.coverage.tried
        assert report.failures == []


def test_a_constraint_on_experts_leaves_out_what_the_chip_cannot_do(check: Check) -> None:
    untold = check(partial(PlantedBackend, operators=liars.UnalignedExperts), "operators/moe_experts/")
    assert {failure.name.split("/")[3] for failure in untold.failures} == {"odd"}
    told = check(partial(PlantedBackend, operators=liars.AlignedExperts), "operators/moe_experts/")
    assert told.failures == []
    skipped = [result for result in told.results if result.status is Status.SKIP_UNDECLARED]
    assert {result.name.split("/")[3] for result in skipped} == {"odd"}


def test_what_is_declared_but_not_there_fails_twice(check: Check) -> None:
    missing = partial(PlantedBackend, operators=liars.Missing, report=liars.all_native)
    report = check(missing, "operators")
    faults = {failure.name: failure.fault for failure in report.failures}
    assert set(faults.values()) == {Fault.DECLARED_BUT_MISSING}
    assert "capabilities/declared_operators_exist" in faults
    assert "operators/linear/float32/prefill" in faults


@pytest.mark.parametrize(
    ("make", "name", "fault"),
    [
        (partial(PlantedBackend, memory=liars.FlipsABit), "memory/copy", Fault.WRONG_RESULT),
        (partial(PlantedBackend, memory=liars.FreesTwice), "memory/free_is_idempotent", Fault.WRONG_RESULT),
        (
            partial(PlantedBackend, memory=liars.MixesDevicesUp),
            "memory/devices_are_independent",
            Fault.OUT_OF_BOUNDS_WRITE,
        ),
        (lambda: PlantedBackend(devices=liars.ListsTooMany()), "device/count", Fault.WRONG_COUNT),
        (lambda: PlantedBackend(devices=liars.ListsTooFew()), "device/count", Fault.WRONG_COUNT),
        (lambda: PlantedBackend(devices=liars.MadeUpProperties()), "device/properties", Fault.WRONG_RESULT),
    ],
    ids=["bit flipped", "freed twice", "devices mixed up", "too many", "too few", "made up"],
)
def test_memory_and_devices_that_lie_fail_by_name(
    check: Check, make: Callable[[], Backend], name: str, fault: Fault
) -> None:
    if name == "memory/devices_are_independent" and len(make().devices.list_devices()) < 2:
        pytest.skip("one device cannot be mixed up with another")
    found = {failure.name: failure.fault for failure in check(make, name).failures}
    assert found == {name: fault}


def _unknown_operator(report: CapabilityReport) -> CapabilityReport:
    return replace(report, operators=(*report.operators, OperatorCapability("conv3d")))


def _unsupported_dtype(report: CapabilityReport) -> CapabilityReport:
    first, *others = report.operators
    return replace(report, operators=(replace(first, dtypes=("float16",)), *others))


def _unreadable_constraint(report: CapabilityReport) -> CapabilityReport:
    first, *others = report.operators
    return replace(report, operators=(replace(first, constraints=("open('x')",)), *others))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_unknown_operator, "capabilities/operator_entries"),
        (_unsupported_dtype, "capabilities/operator_entries"),
        (_unreadable_constraint, "capabilities/operator_entries"),
        (lambda report: replace(report, accumulation_dtype="int3"), "capabilities/precisions"),
        (lambda report: replace(report, page_sizes_tokens=(16, 16)), "capabilities/sizes"),
        (
            lambda report: replace(report, collectives=("all_reduce",)),
            "capabilities/declared_collectives_exist",
        ),
    ],
    ids=[
        "unknown operator",
        "dtype the chip lacks",
        "constraint",
        "accumulation",
        "page sizes",
        "collectives",
    ],
)
def test_a_report_that_contradicts_itself_fails_by_name(
    check: Check, change: Callable[[CapabilityReport], CapabilityReport], name: str
) -> None:
    report = check(partial(PlantedBackend, report=change), "capabilities/")
    assert [failure.name for failure in report.failures] == [name]


def test_a_declared_collective_that_is_not_there_fails_by_name(check: Check) -> None:
    make = partial(PlantedBackend, report=lambda report: replace(report, collectives=("all_reduce",)))
    report = check(make, "collectives/")
    statuses = {result.name: result.status for result in report.results}
    assert statuses["collectives/all_reduce"] is Status.FAIL
    assert statuses["collectives/barrier"] is Status.SKIP_UNDECLARED


class _SumsTwiceBackend(PlantedBackend):
    def __init__(self) -> None:
        super().__init__()
        self._collectives = liars.SumsTwice()


def test_a_wrong_sum_over_ranks_is_named_on_every_rank(tmp_path: Path) -> None:
    def run(rank: int) -> dict[str, str]:
        return check_rank(
            _SumsTwiceBackend(),
            ["all_reduce", "all_gather"],
            rank=rank,
            world_size=2,
            rendezvous=f"file://{tmp_path}/meeting",
        )

    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(run, range(2)):
            assert "all_reduce of float32" in outcome["all_reduce"]
            assert outcome["all_gather"] == ""


class _Summing(PlantedBackend):
    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives


@pytest.mark.parametrize(
    ("liar", "primitive", "world_size", "words"),
    [
        (liars.WaitsForTheOthers, "async_all_reduce", 2, "waits for the other ranks"),
        (liars.SharesOneResult, "async_all_reduce", 2, "under way"),
        (liars.AddsItsOwnFirst, "all_reduce", 3, "ranks have different bits of the sum"),
        (liars.BlamesItself, "all_reduce", 2, "rank 1 did not come to a sum; the error names 0"),
    ],
)
def test_sums_that_are_wrong_in_one_way_only_are_found(
    liar: Callable[[], Collectives],
    primitive: str,
    world_size: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_sums, "_BEGUN_LIMIT_S", 2.0)

    def run(rank: int) -> str:
        meeting = f"file://{tmp_path}/meeting"
        backend = _Summing(liar())
        return check_rank(backend, [primitive], rank=rank, world_size=world_size, rendezvous=meeting)[
            primitive
        ]

    with ThreadPoolExecutor(world_size) as pool:
        assert words in "; ".join(pool.map(run, range(world_size)))


def test_ranks_that_cannot_start_say_why() -> None:
    outcomes = run_ranks("abacus", {}, ["barrier"])
    assert len(outcomes) == 2
    assert all("UnknownBackend: backend 'abacus' is unknown" in outcome["error"] for outcome in outcomes)
