"""How the plugin starts: options, visibility, what is looked for, and what is refused with which words."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from meshkit.cli.app import main
from meshkit.errors import FailedPrecondition, InvalidArgument
from plugins.conformance.kit import run_conformance
from plugins.conformance.report import Status
from plugins.cuda import backend, runtime
from plugins.cuda.devices import CudaDevices
from plugins.cuda.environment import look_for_driver, no_device, prepare_environment
from plugins.cuda.options import CudaOptions, read_options
from plugins.cuda.runtime import load_libraries, open_runtime, settle_precision
from plugins.sdk.registry import load_backend, register_backend
from plugins.sdk.visibility import Visibility
from plugins.verification.report import Check, Report
from plugins.verification.request import BackendChoice
from plugins.verification.verify import check_in_child
from tests.unit.cuda_plugin.stand_in import StandInCuda, runtime_of

CPU_BUILD = torch.version.cuda is None
needs_cpu_build = pytest.mark.skipif(not CPU_BUILD, reason="this torch is a CUDA build")


@pytest.fixture
def _environment() -> Iterator[None]:
    """The plugin sets variables of the process: taken back after the test, as is how CUDA was started."""
    with mock.patch.dict(os.environ), mock.patch.object(runtime, "_start", runtime._Start()):
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
            os.environ.pop(name, None)
        yield


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch, _environment: None) -> Any:
    """A torch that is built with CUDA and finds the stand-in's two devices."""
    cuda = StandInCuda()
    fake: Any = SimpleNamespace(
        __version__="2.9.0+cu128",
        version=SimpleNamespace(cuda="12.8"),
        cuda=SimpleNamespace(
            is_available=lambda: cuda.count > 0,
            is_initialized=lambda: False,
            device_count=cuda.device_count,
            get_device_capability=cuda.get_device_capability,
            get_arch_list=cuda.get_arch_list,
        ),
        distributed=SimpleNamespace(is_available=lambda: False),
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace())),
        set_float32_matmul_precision=lambda name: None,
        device=torch.device,
        stand_in=cuda,
    )
    process_group = SimpleNamespace(new_process_group=None, close_process_group=None)
    found = {"torch": fake, "plugins.sdk.process_group": process_group}

    def load(name: str) -> Any:
        if name not in found:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found[name]

    monkeypatch.setattr(runtime, "importlib", SimpleNamespace(import_module=load))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(runtime, "open_nvml", lambda: runtime_of().nvml)
    monkeypatch.setattr(runtime, "load_libraries", lambda wanted, capability: {})
    return fake


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"devices": "0"}, "backend_options.devices"),
        ({"visible_devices": "0,0"}, "backend_options.visible_devices"),
        ({"visible_devices": "0,x"}, "backend_options.visible_devices"),
        ({"visible_devices": ""}, "backend_options.visible_devices"),
        ({"kernel_libraries": "cutlass"}, "backend_options.kernel_libraries"),
        ({"kernel_libraries": "none,triton"}, "backend_options.kernel_libraries"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        read_options(options)
    assert error.value.field == field


def test_options_are_read_in_the_order_of_preference() -> None:
    assert read_options({}) == CudaOptions(None, None)
    assert read_options({"kernel_libraries": "none"}).kernel_libraries == ()
    assert read_options({"kernel_libraries": "triton, flashinfer"}).kernel_libraries == (
        "flashinfer",
        "triton",
    )
    assert read_options({"visible_devices": "1, GPU-8932f937"}).visible_devices == "1,GPU-8932f937"


@needs_cpu_build
@pytest.mark.usefixtures("_environment")
def test_without_a_gpu_the_plugin_refuses_and_lists_what_it_looked_for() -> None:
    register_backend("cuda", backend)
    before = dict(os.environ)
    with pytest.raises(FailedPrecondition) as error:
        load_backend("cuda", {"visible_devices": "0"})
    assert error.value.field == "backend"
    assert error.value.reason == "NO_DEVICE"
    assert "this torch is built without CUDA" in error.value.message
    for piece in (
        torch.__version__,
        "libcuda.so.1",
        "/dev/nvidia[0-9]",
        "CUDA_VISIBLE_DEVICES: '0'",
        "--gpus all",
    ):
        assert piece in error.value.message
    assert len(error.value.message.encode()) <= 1200, "a longer one is clipped on its way to a client"
    assert dict(os.environ) == before, "nothing is set for a chip that is not there"


@needs_cpu_build
def test_conformance_skips_for_want_of_hardware_and_never_passes(capsys: pytest.CaptureFixture[str]) -> None:
    register_backend("cuda", backend)
    report = run_conformance("cuda")
    assert {result.status for result in report.results} == {Status.SKIP_NO_HARDWARE}
    assert all("libcuda.so.1" in result.detail for result in report.results)
    main(["conformance", "--backend", "cuda", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["pass"], told["fail"]) == (0, 0)
    assert told["skip_no_hardware"] == len(report.results)


@needs_cpu_build
def test_verify_fails_with_the_same_words() -> None:
    """In this process: the one that the command spawns finds back ends by entry points only."""
    register_backend("cuda", backend)
    told: list[Any] = []
    channel: Any = SimpleNamespace(send=told.append)
    check_in_child(channel, BackendChoice("cuda", {}))
    checks = [Check.from_json(message["check"]) for message in told if "check" in message]
    assert [check.name for check in checks] == ["load"]
    assert "libcuda.so.1" in checks[0].detail
    assert Report("verification", "cuda", tuple(checks), {}).failed


def test_nothing_imports_torch_before_the_environment_is_set() -> None:
    """torch and CUDA read theirs when they are loaded."""
    code = (
        "import sys, plugins.cuda, plugins.cuda.options, plugins.cuda.runtime; print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_the_driver_is_looked_for_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()

    def absent(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    pieces = {piece.name: piece.state for piece in look_for_driver("0", root=tmp_path, load=absent)}
    assert pieces == {
        "driver library libcuda.so.1": "absent",
        f"{tmp_path}/dev/nvidia[0-9]": "2 files",
        "CUDA_VISIBLE_DEVICES": "'0'",
    }
    found = look_for_driver(None, root=tmp_path, load=lambda name: name)
    assert [piece.state for piece in found] == ["found", "2 files", "not set"]
    assert no_device("a cause", "2.9.0", found).reason == "NO_DEVICE"


def test_ids_are_those_of_nvidia_smi_and_the_hosts_settings_stay() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert prepare_environment(environment, "2,3") == environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert prepare_environment({}, None) is None
    assert prepare_environment({"CUDA_VISIBLE_DEVICES": "1"}, None) == "1"


def test_a_start_sets_visibility_before_cuda_is_asked(cuda_build: Any) -> None:
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return True

    cuda_build.cuda.is_available = is_available
    opened = open_runtime(CudaOptions(visible_devices="4,6"))
    assert seen == ["4,6"]
    assert opened.visibility.in_effect == "4,6"
    assert opened.cuda_version == "12.8"
    assert opened.nccl_version == ""
    assert opened.place(1) == torch.device("cuda", 1)
    assert opened.libraries == {}


def test_a_build_with_cuda_that_sees_no_device_says_so(cuda_build: Any) -> None:
    cuda_build.stand_in.count = 0
    with pytest.raises(FailedPrecondition, match="built with CUDA, but sees no device") as error:
        open_runtime(CudaOptions(visible_devices="7"))
    assert error.value.reason == "NO_DEVICE"
    assert "2.9.0+cu128 for CUDA 12.8" in error.value.message
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.usefixtures("cuda_build")
def test_naming_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"names 3 devices \(0,1,9\), but the runtime") as error:
        open_runtime(CudaOptions(visible_devices="0,1,9"))
    assert error.value.reason == "VISIBILITY"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "sm_86"), False),
        ((9, 0), ("compute_80",), True),
        ((10, 0), ("sm_90a", "sm_100"), True),
        ((9, 0), ("sm_90a",), True),
        ((12, 0), ("sm_120a",), True),
        ((12, 1), ("sm_120a",), False),
    ],
)
def test_a_gpu_that_this_torch_has_no_code_for_is_refused(
    cuda_build: Any, capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    cuda_build.stand_in.capability, cuda_build.stand_in.architectures = capability, architectures
    if runs:
        open_runtime(CudaOptions())
        return
    with pytest.raises(
        FailedPrecondition, match=f"this torch is built for {', '.join(architectures)}"
    ) as error:
        open_runtime(CudaOptions())
    assert error.value.reason == "DEVICE_UNSUPPORTED"


def test_a_process_that_used_torch_cuda_before_is_refused(cuda_build: Any) -> None:
    cuda_build.cuda.is_initialized = lambda: True
    with pytest.raises(FailedPrecondition, match="a process of its own") as error:
        open_runtime(CudaOptions())
    assert error.value.reason == "RUNTIME_STARTED"


def test_the_plugin_may_be_opened_again_with_the_same_devices_only(cuda_build: Any) -> None:
    open_runtime(CudaOptions(visible_devices="0,1"))
    cuda_build.cuda.is_initialized = lambda: True
    assert open_runtime(CudaOptions(visible_devices="0,1")).visibility.in_effect == "0,1"
    assert open_runtime(CudaOptions()).visibility.in_effect == "0,1"
    with pytest.raises(FailedPrecondition, match="runs in this process with devices 0,1; 1 would have no"):
        open_runtime(CudaOptions(visible_devices="1"))


def test_a_visibility_variable_that_changes_later_is_reported_when_devices_are_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    runtime_ = runtime_of(visibility=Visibility(("CUDA_VISIBLE_DEVICES",), "0", environment))
    devices = CudaDevices(runtime_)
    with caplog.at_level(logging.WARNING):
        devices.list_devices()
        assert not caplog.text
        environment["CUDA_VISIBLE_DEVICES"] = "1"
        devices.list_devices()
        devices.list_devices()
    assert caplog.text.count("no effect") == 1
    assert devices.properties(0).attributes["visible_devices"] == "0"


def test_a_kernel_library_is_used_where_it_imports_and_required_where_it_is_named() -> None:
    def load(name: str) -> str:
        if name == "flashinfer":
            raise ImportError("libcudart.so.12: cannot open shared object file")
        return name

    assert load_libraries(None, (8, 0), load=load) == {"triton": "triton"}
    assert load_libraries((), (8, 0), load=load) == {}
    assert load_libraries(None, (7, 5), load=load) == {}
    with pytest.raises(FailedPrecondition, match=r"libcudart\.so\.12") as error:
        load_libraries(("flashinfer",), (8, 0), load=load)
    assert error.value.field == "backend_options.kernel_libraries"
    with pytest.raises(FailedPrecondition, match=r"takes compute capability 8\.0, here is 7\.5"):
        load_libraries(("triton",), (7, 5), load=load)


def test_products_keep_float32_and_sum_in_it() -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    kept = {name: getattr(matmul, name) for name in names}
    try:
        torch.set_float32_matmul_precision("high")
        settle_precision(torch)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not matmul.allow_tf32
        assert not any(getattr(matmul, name) for name in names)
    finally:
        torch.set_float32_matmul_precision(before)
        for name, value in kept.items():
            setattr(matmul, name, value)
