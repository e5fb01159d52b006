"""Liars of two duties that are easy to get nearly right: tensors over buffers, and work under settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from meshkit.errors import MeshError
from plugins.conformance.report import Fault, Report, Status
from plugins.cpu.memory import CpuMemory
from plugins.sdk.backend import Backend
from tests.conformance.liars import PlantedBackend

Check = Callable[..., Report]
T = TypeVar("T")


class ViewsAreCopies(CpuMemory):
    """A buffer's tensor is filled once, when the buffer is made."""

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return super()._view(memory, shape, dtype).clone()


class HostViewsAreCopies(CpuMemory):
    """The same for host memory alone."""

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        view = super()._view(memory, shape, dtype)
        return view.clone() if self._next_is_of_the_host else view

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        self._next_is_of_the_host = device is None
        return super()._reserve(nbytes, device)


class _Works(PlantedBackend):
    """execute_runnable as a subclass has it."""

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        raise NotImplementedError


class RunsTwice(_Works):
    """Warms up first."""

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        runnable()
        return runnable()


class LosesTheResult(_Works):
    """Returns a copy of nothing."""

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        runnable()
        return None  # type: ignore[return-value]


class SwallowsErrors(_Works):
    """Logs, and goes on."""

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        try:
            return runnable()
        except Exception:  # noqa: BLE001 - that is the lie
            return None  # type: ignore[return-value]


class TranslatesErrors(_Works):
    """Makes every exception one of its own."""

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        try:
            return runnable()
        except Exception as error:
            raise MeshError("the chip failed") from error


@pytest.mark.parametrize("memory", [ViewsAreCopies, HostViewsAreCopies])
def test_a_tensor_that_is_a_copy_of_its_buffer_fails_by_name(check: Check, memory: type[CpuMemory]) -> None:
    report = check(partial(PlantedBackend, memory=memory), "memory/")
    assert {each.name: each.fault for each in report.failures} == {"memory/views": Fault.WRONG_RESULT}


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (RunsTwice, Fault.WRONG_BEHAVIOUR),
        (LosesTheResult, Fault.WRONG_RESULT),
        (SwallowsErrors, Fault.WRONG_BEHAVIOUR),
        (TranslatesErrors, Fault.RAISED),
    ],
)
def test_work_that_is_not_run_as_it_is_fails_by_name(
    check: Check, make: Callable[[], Backend], fault: Fault
) -> None:
    report = check(make, "device/execute_runnable")
    assert [(each.name, each.fault) for each in report.failures] == [("device/execute_runnable", fault)]


def test_honest_duties_pass(check: Check) -> None:
    for name in ("memory/views", "device/execute_runnable"):
        assert [each.status for each in check(PlantedBackend, name).results] == [Status.PASS]
