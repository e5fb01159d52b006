"""The kit finds, by name, what goes wrong between the kunlun plugin and its chip: each mutation of a call of
the vendor's operators on their emulator, whether the plugin's own trial at start saw it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from plugins.conformance.report import Fault, Report, Status
from plugins.kunlun.operators import KunlunOperators
from plugins.kunlun.plugin import KunlunBackend
from plugins.kunlun.runtime import Runtime
from tests.unit.kunlun_plugin.emulated import RUNTIME, runtime_with
from tests.unit.kunlun_plugin.test_kunlun_probes import MUTATIONS

Check = Callable[..., Report]
WRONG = {Fault.WRONG_RESULT, Fault.OUT_OF_BOUNDS_WRITE, Fault.NON_FINITE, Fault.RAISED}
"""RAISED: the emulator itself refuses some calls, as the chip's runtime does."""


def _rotates_in_place(
    self: KunlunOperators, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    parts = [part.flatten(1).contiguous() for part in (query, key)]
    RUNTIME.ops.rotary_embedding(positions, *parts, query.shape[-1], cos_sin.to(query.dtype), True)
    return parts[0].view(query.shape), parts[1].view(key.shape)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products here are tiny, and spinning threads beside a busy process take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def _start(without: tuple[str, ...] = ()) -> KunlunBackend:
    """The plugin on a good runtime, started once for all tests."""
    return KunlunBackend(runtime_with(without=without))


def _mutated(mutation: str) -> tuple[Runtime, tuple[str, ...]]:
    """A runtime with one operator mutated, and the operators that it lacks, so that this one is used."""
    _, kernel, call = MUTATIONS[mutation]
    without = ("paged_attention",) if kernel == "speculative_attention" else ()
    return runtime_with(without=without, **{kernel: call}), without


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_that_the_plugin_saw_at_its_start_fails_by_name(check: Check, mutation: str) -> None:
    operator = MUTATIONS[mutation][0]
    runtime, _ = _mutated(mutation)
    report = check(lambda: KunlunBackend(runtime), f"operators/{operator}")
    failures = {each.name: each for each in report.failures}
    failure = failures[f"operators/{operator}/declined_at_start"]
    assert failure.fault is Fault.DECLINED_AT_START
    assert "compared with the reference at load" in failure.detail


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_that_no_trial_saw_fails_by_name(
    check: Check, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    operator = MUTATIONS[mutation][0]
    runtime, without = _mutated(mutation)
    backend = _start(without)
    monkeypatch.setattr(backend._operators, "_ops", runtime.ops)
    report = check(lambda: backend, f"operators/{operator}/")
    assert {each.fault for each in report.failures} <= WRONG
    assert {each.name.split("/")[2] for each in report.failures} == {"float32", "bfloat16", "float16"}


def test_without_a_mutation_the_same_operators_pass(check: Check) -> None:
    for without in ((), ("paged_attention",)):
        for operator in {operator for operator, _, _ in MUTATIONS.values()}:
            report = check(lambda without=without: _start(without), f"operators/{operator}/")
            assert report.results
            assert report.failures == []


def test_rotary_that_works_on_its_inputs_fails_by_name(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KunlunOperators, "rotary", _rotates_in_place)
    report = check(lambda: KunlunBackend(RUNTIME), "operators/rotary")
    assert [(each.name, each.fault) for each in report.failures] == [
        ("operators/rotary/declined_at_start", Fault.DECLINED_AT_START)
    ]


def test_rotary_that_works_on_its_inputs_later_fails_by_name(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = _start()
    monkeypatch.setattr(KunlunOperators, "rotary", _rotates_in_place)
    report = check(lambda: backend, "operators/rotary")
    assert {each.fault for each in report.failures} == {Fault.INPUT_OVERWRITTEN}


def test_what_the_plugin_declines_by_design_is_no_failure(check: Check) -> None:
    report = check(_start, "operators/sample")
    assert [(each.name, each.status) for each in report.results] == [
        ("operators/sample", Status.SKIP_UNDECLARED)
    ]
