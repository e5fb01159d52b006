"""The seam: what is looked for, set before the runtime loads, and refused; how it synchronises."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshkit.errors import FailedPrecondition, InvalidArgument, Unavailable
from plugins.kunlun import backend, runtime
from plugins.kunlun.devices import KunlunDevices
from plugins.kunlun.environment import (
    DEVICE_FILE,
    MODULES,
    look_for_runtime,
    prepare_environment,
    require_pieces,
)
from plugins.kunlun.memory import KunlunMemory
from plugins.kunlun.options import KunlunOptions, read_options
from plugins.kunlun.stacks import check_stack
from plugins.sdk.registry import load_backend, register_backend
from plugins.sdk.visibility import count_device_files
from tests.unit.kunlun_plugin.emulated import RUNTIME

VENDOR = {"torch": "2.9.0+xpu3.6", "kunlun_ops": "0.1.205", "xspeedgate_ops": "1.3.0", "cocopod": "1.3.0"}


@pytest.fixture
def _environment() -> Iterator[None]:
    """The plugin sets variables of the process: taken back after the test."""
    with mock.patch.dict(os.environ):
        for name in ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "XPU_DUMMY_EVENT"):
            os.environ.pop(name, None)
        yield


def test_without_the_runtime_the_plugin_refuses_and_lists_what_it_looked_for() -> None:
    register_backend("kunlun", backend)
    before = dict(os.environ)
    with pytest.raises(FailedPrecondition) as error:
        load_backend("kunlun", {})
    assert error.value.field == "backend"
    assert error.value.reason == "RUNTIME_ABSENT"
    for piece in (*MODULES, "/usr/local/xre", "/usr/local/xccl", "/dev/xpu", "xpu-smi", "LD_LIBRARY_PATH"):
        assert piece in error.value.message
    assert "emulate=true" in error.value.message
    assert len(error.value.message.encode()) <= 1200, "a longer one is clipped on its way to a client"
    assert dict(os.environ) == before, "nothing is set for a runtime that is not there"


def test_pieces_are_looked_for_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "usr/local/xccl/so").mkdir(parents=True)
    (tmp_path / "usr/local/xccl/so/libbkcl.so").touch()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/xpu0").touch()
    pieces = look_for_runtime(
        root=tmp_path,
        search_path="/usr/local/xre/so:/usr/local/xccl/so",
        find=lambda name: object() if name == "cocopod" else None,
    )
    found = {piece.name for piece in pieces if piece.found}
    assert found >= {"cocopod", "XCCL (libbkcl.so)", "devices", "library path"}
    assert not found & {"XRE", "driver", "kunlun_ops"}
    with pytest.raises(FailedPrecondition, match="cocopod in this interpreter's modules: found"):
        require_pieces(pieces)
    require_pieces([piece for piece in pieces if piece.found or not piece.required])


def test_physical_chips_are_counted_by_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("xpu0", "xpu1", "xpu10", "xpuctrl", "xpu1p"):
        (tmp_path / "dev" / name).touch()
    assert count_device_files(DEVICE_FILE, None, root=tmp_path) == 3
    assert RUNTIME.physical_device_count is None


def test_both_visibility_variables_are_set_and_the_host_settings_stay() -> None:
    environment = {"XPU_DUMMY_EVENT": "1", "XPU_USE_MOE_SORTED_THRES": "64"}
    assert prepare_environment(environment, "2,3") == "2,3"
    assert environment["XPU_VISIBLE_DEVICES"] == environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["CUDA_DEVICE_ORDER"] == "OAM_ID"
    assert environment["XMLIR_ENABLE_MOCK_TORCH_COMPILE"] == "false"
    assert environment["XPU_USE_MOE_SORTED_THRES"] == "64"
    assert "XPU_DUMMY_EVENT" not in environment
    assert prepare_environment({}, None) is None
    one = {"CUDA_VISIBLE_DEVICES": "1"}
    assert prepare_environment(one, None) == one["XPU_VISIBLE_DEVICES"] == "1"


def test_settings_under_which_the_chip_does_not_work_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match="XMLIR_DISABLE_CUDA_ALLOCATOR"):
        prepare_environment({"XMLIR_DISABLE_CUDA_ALLOCATOR": "1"}, None)
    with pytest.raises(FailedPrecondition, match="contradict"):
        prepare_environment({"XPU_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, None)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"emulated": "true"}, "backend_options.emulated"),
        ({"emulate": "yes please"}, "backend_options.emulate"),
        ({"visible_devices": "0,0"}, "backend_options.visible_devices"),
        ({"visible_devices": "0,x"}, "backend_options.visible_devices"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        read_options(options)
    assert error.value.field == field


def test_the_emulator_is_never_the_default() -> None:
    assert not read_options({}).emulate
    assert read_options({"emulate": "TRUE", "visible_devices": "1, 2"}) == KunlunOptions(True, "1,2")


@pytest.mark.usefixtures("_environment")
def test_visible_devices_narrow_the_emulated_host_and_touch_no_variable_of_the_process() -> None:
    before = dict(os.environ)
    opened = runtime.open_runtime(KunlunOptions(emulate=True, visible_devices="4,6"))
    assert opened.cuda.device_count() == 2
    assert dict(os.environ) == before
    with pytest.raises(FailedPrecondition, match=r"name 2 devices \(7,8\), but the runtime sees 1"):
        runtime.open_runtime(KunlunOptions(emulate=True, visible_devices="7,8"))


def test_versions_that_were_released_together_are_taken_and_others_refused() -> None:
    assert check_stack(VENDOR) == "sglang-kunlun"
    older = {"torch": "2.5.1", "kunlun_ops": "0.1.58", "xspeedgate_ops": "1.1.0", "cocopod": "1.1.0"}
    assert check_stack(older) == "vLLM-Kunlun"
    for changes in ({"torch": "2.5.1"}, {"kunlun_ops": "0.1.58"}, {"cocopod": ""}):
        with pytest.raises(FailedPrecondition, match="do not go together") as error:
            check_stack({**VENDOR, **changes})
        assert error.value.reason == "VERSION_MISMATCH"
        assert "kunlun_ops >=0.1.205" in error.value.message


@pytest.fixture
def _vendor_modules(monkeypatch: pytest.MonkeyPatch, _environment: None) -> None:
    """The vendor's modules by their own names, on a host whose torch has no chip."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, sys.modules[f"plugins.kunlun_emulator.{name}"])


@pytest.mark.usefixtures("_vendor_modules")
def test_vendor_packages_beside_another_torch_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match="do not go together"):
        load_backend("kunlun", {})


@pytest.mark.usefixtures("_vendor_modules")
def test_vendor_packages_without_a_chip_are_refused_after_the_environment_was_set() -> None:
    with pytest.raises(FailedPrecondition, match=r"torch\.cuda\.is_available\(\) is False") as error:
        load_backend("kunlun", {"check_versions": "false", "visible_devices": "0"})
    assert error.value.reason == "NO_DEVICE"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["XPU_VISIBLE_DEVICES"] == "0"


@pytest.mark.usefixtures("_vendor_modules")
def test_a_library_with_an_unresolved_symbol_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        if name == "kunlun_ops":
            raise ImportError("libxpu.so: undefined symbol: _ZN3xpu4initEv")
        return sys.modules[name]

    monkeypatch.setattr(runtime.importlib, "import_module", broken)  # type: ignore[attr-defined]
    with pytest.raises(FailedPrecondition, match="undefined symbol") as error:
        runtime.open_runtime(KunlunOptions())
    assert error.value.reason == "RUNTIME_BROKEN"


@pytest.mark.usefixtures("_vendor_modules")
def test_a_process_that_used_torch_cuda_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(FailedPrecondition, match="a process of its own"):
        runtime.open_runtime(KunlunOptions())


def test_another_generation_of_the_chip_is_refused() -> None:
    other = SimpleNamespace(xpu=SimpleNamespace(is_available=lambda: True), get_xpu_version=lambda: "KL2")
    with pytest.raises(FailedPrecondition, match="sees chip 'KL2'"):
        runtime._check_chip(other, RUNTIME.cuda)


def test_where_the_devices_own_call_fails_its_stream_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    waited: list[int] = []

    def fails(index: int) -> None:
        raise RuntimeError("operation not supported")

    def stream(index: int) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(index))

    build = replace(RUNTIME, cuda=SimpleNamespace(synchronize=fails, current_stream=stream))
    with caplog.at_level(logging.WARNING):
        build.synchronize(3)
        build.synchronize()
    assert waited == [3, 0]
    assert caplog.text.count("operation not supported") == 1


def test_a_device_that_failed_is_unavailable() -> None:
    def fails(*arguments: int) -> None:
        raise RuntimeError("kernel timed out")

    failed = SimpleNamespace(
        device_count=lambda: 1,
        get_device_properties=fails,
        mem_get_info=fails,
        synchronize=fails,
        current_stream=lambda index: SimpleNamespace(synchronize=fails),
    )
    build = replace(RUNTIME, cuda=failed)
    devices, memory = KunlunDevices(build), KunlunMemory(build)
    for call in (devices.properties, devices.synchronize, memory.stats):
        with pytest.raises(Unavailable, match="device 0 does not answer: kernel timed out") as error:
            call(0)
        assert error.value.reason == "DEVICE_FAILED"


def test_a_visibility_variable_that_changes_later_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"XPU_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    loaded = replace(RUNTIME, visible="0", environment=environment)
    with caplog.at_level(logging.WARNING):
        loaded.visibility.warn_if_changed()
        assert not caplog.text
        environment["CUDA_VISIBLE_DEVICES"] = "1"
        loaded.visibility.warn_if_changed()
        loaded.visibility.warn_if_changed()
    assert caplog.text.count("no effect") == 1


def test_on_hardware_tensors_lie_where_cuda_keeps_them() -> None:
    assert replace(RUNTIME, emulation_note="").torch_device(2) == torch.device("cuda", 2)
    assert RUNTIME.torch_device(2) == torch.device("cpu")
