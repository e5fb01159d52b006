"""The chosen back end is loaded and no other; what cannot be loaded says why and what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError, Unavailable
from plugins.sdk import registry
from plugins.sdk.backend import PluginInfo
from plugins.sdk.capabilities import CapabilityReport, LinkCapability, OperatorCapability
from plugins.sdk.device import DeviceManager, DeviceProperties
from plugins.sdk.host import HostDevices
from plugins.sdk.registry import UnknownBackend, list_backends, load_backend, register_backend, start_backend
from tests.unit.sdk.toy_backend import ToyBackend, toy_factory

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def broken_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        EntryPoint("absent", "vendor_runtime_nobody_has.plugin:backend", registry.ENTRY_POINT_GROUP),
        EntryPoint("good", "tests.unit.sdk.toy_backend:toy_factory", registry.ENTRY_POINT_GROUP),
    )
    monkeypatch.setattr(registry, "_entry_points", lambda: points)


def test_a_registered_backend_loads_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    register_backend("toy", toy_factory())
    with caplog.at_level(logging.INFO, logger="plugins.sdk.registry"):
        backend = load_backend("toy", {})
    assert isinstance(backend, ToyBackend)
    assert "Backend toy loaded successfully" in caplog.text


def test_this_packages_entry_points_are_listed() -> None:
    assert ("cpu", "plugins.cpu:backend") in [(item.name, item.origin) for item in list_backends()]


@pytest.mark.usefixtures("broken_plugins")
def test_an_unknown_backend_lists_what_is_installed_and_why_others_are_not_usable() -> None:
    register_backend("toy", toy_factory())
    with pytest.raises(UnknownBackend) as caught:
        load_backend("gpu", {})
    error = caught.value
    assert error.field == "backend"
    assert "'gpu' is unknown; installed: good, toy" in error.message
    assert "absent (ModuleNotFoundError: No module named 'vendor_runtime_nobody_has'" in error.message
    assert "executor.python" in error.message


@pytest.mark.usefixtures("broken_plugins")
def test_a_plugin_that_does_not_import_is_refused_with_the_cause_and_the_remedy() -> None:
    with pytest.raises(FailedPrecondition, match=r"vendor_runtime_nobody_has.*Install the package") as caught:
        load_backend("absent", {})
    assert caught.value.reason == "BACKEND_IMPORT_FAILED"


def test_a_factory_that_raises_is_refused_with_the_cause() -> None:
    def fail(options: object) -> ToyBackend:
        raise OSError("libvendor.so.5: cannot open shared object file")

    register_backend("toy", fail)
    with pytest.raises(FailedPrecondition, match=r"libvendor\.so\.5.*LD_LIBRARY_PATH") as caught:
        load_backend("toy", {})
    assert isinstance(caught.value.__cause__, OSError)


def test_a_factorys_own_error_passes_as_it_is() -> None:
    def refuse(options: object) -> ToyBackend:
        raise InvalidArgument("threads is 0", field="backend_options.threads")

    register_backend("toy", refuse)
    with pytest.raises(InvalidArgument, match="threads is 0"):
        load_backend("toy", {})


def test_a_factory_that_returns_something_else_is_refused() -> None:
    register_backend("toy", lambda options: object())  # type: ignore[arg-type, return-value]
    with pytest.raises(FailedPrecondition, match="returned object"):
        load_backend("toy", {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contract_range": ">=2.0,<3"}, r"contract >=2\.0,<3; here it is 1\.0"),
        ({"runtime_version": "5.0.21", "runtime_range": ">=5.19"}, r"runtime >=5\.19; here it is 5\.0\.21"),
        ({"runtime_range": ">=5.19"}, "here it is not reported"),
        (
            {"collective_library_version": "dev", "collective_library_range": ">=1"},
            "cannot be compared",
        ),
    ],
)
def test_a_version_outside_the_declared_range_is_refused_with_both_named(
    changes: dict[str, str], words: str
) -> None:
    register_backend("toy", toy_factory(**changes))
    with pytest.raises(FailedPrecondition, match=words) as caught:
        load_backend("toy", {})
    assert caught.value.reason == "VERSION_MISMATCH"


def test_a_development_version_within_the_range_is_taken() -> None:
    register_backend("toy", toy_factory(runtime_version="1.2.0.dev3+gabc", runtime_range=">=1.2,<2"))
    load_backend("toy", {})


def test_choosing_one_plugin_imports_no_other() -> None:
    code = (
        "import sys\n"
        "from plugins.sdk.registry import load_backend\n"
        "load_backend('cpu', {'threads': '1'})\n"
        "print(sorted(name for name in sys.modules if name.startswith('plugins.')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "plugins.cpu" in result.stdout
    assert "plugins.hash" not in result.stdout


class _Devices(HostDevices):
    """As many as a test says."""

    def __init__(self, listed: Callable[[], Sequence[DeviceProperties]]) -> None:
        super().__init__()
        self._listed = listed

    def list_devices(self) -> Sequence[DeviceProperties]:
        return self._listed()


class _Chip(ToyBackend):
    """A back end that answers what a test says."""

    def __init__(
        self, report: Callable[[], Any] | None = None, devices: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(PluginInfo(name="toy", plugin_version="1.2.3"))
        self._report = report or (lambda: CapabilityReport(chip="toy"))
        self._devices = HostDevices(count=2) if devices is None else _Devices(devices)

    def capabilities(self) -> CapabilityReport:
        report: CapabilityReport = self._report()
        return report

    @property
    def devices(self) -> DeviceManager:
        return self._devices


def _raise(error: Exception) -> Any:
    raise error


def _refusal(chip: _Chip) -> MeshError:
    register_backend("toy", lambda options: chip)
    with pytest.raises(MeshError) as caught:
        load_backend("toy", {})
    start_backend("toy", {})  # Tools that report on it still get it.
    return caught.value


def test_a_contradictory_report_is_refused_with_all_its_contradictions() -> None:
    def report() -> CapabilityReport:
        conv = OperatorCapability("conv3d")
        return CapabilityReport(
            chip="toy", operators=[conv], kv_cache_dtypes=(), links=[LinkCapability(2)], collectives=["sum"]
        )

    error = _refusal(_Chip(report))
    assert (type(error), error.reason, error.field) == (
        FailedPrecondition, "CONTRADICTORY_REPORT", "backend"
    )  # fmt: skip
    for word in ("'toy' has 4 contradictions", "conv3d", "kv_cache_dtypes is empty", "device 2", "'sum'"):
        assert word in error.message


def test_a_report_with_a_field_that_the_contract_does_not_know_is_one_error() -> None:
    error = _refusal(_Chip(lambda: CapabilityReport(chip="toy", warp_size=32)))  # type: ignore[call-arg]
    assert error.reason == "BACKEND_FAILED"
    assert "'toy' does not report its capabilities: TypeError" in error.message
    assert "warp_size" in error.message


@pytest.mark.parametrize(
    "report",
    [
        lambda: {"chip": "toy"},
        lambda: CapabilityReport(chip="toy", page_sizes_tokens=("16",)),  # type: ignore[arg-type]
        lambda: CapabilityReport(chip="toy", preferred_batch_size=2**40),
    ],
    ids=["another kind", "a text for a number", "too large for its message"],
)
def test_a_report_that_cannot_be_read_is_refused(report: Callable[[], Any]) -> None:
    assert _refusal(_Chip(report)).reason == "BACKEND_FAILED"


def test_a_plugin_without_devices_is_refused_with_the_way_out() -> None:
    error = _refusal(_Chip(devices=list))
    assert (type(error), error.reason) == (FailedPrecondition, "NO_DEVICE")
    for word in ("'toy' lists no device", "driver", "visibility variable", "executor.environment"):
        assert word in error.message


def test_devices_that_cannot_be_listed_are_described_in_one_line() -> None:
    error = _refusal(_Chip(devices=lambda: _raise(OSError("ioctl failed\nerrno 19"))))
    assert error.reason == "BACKEND_FAILED"
    assert "'toy' does not list its devices: OSError: ioctl failed errno 19. " in error.message


def test_a_plugins_own_error_about_its_devices_passes_as_it_is() -> None:
    own = Unavailable("device 0 has fallen off the bus", reason="DEVICE_FAILED")
    assert _refusal(_Chip(devices=lambda: _raise(own))) is own


def test_versions_that_are_no_texts_are_refused() -> None:
    register_backend("toy", toy_factory(contract_version=1.0))  # type: ignore[arg-type]
    with pytest.raises(FailedPrecondition, match=r"has to hold texts: contract_version is 1\.0"):
        load_backend("toy", {})


def test_two_packages_that_offer_the_same_name_and_file_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "tests.unit.sdk.toy_backend:toy_factory"
    points = []
    for package in ("one", "other"):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        point = EntryPoint("twin", value, registry.ENTRY_POINT_GROUP)
        points.append(point._for(Distribution.at(info)))  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "_entry_points", lambda: tuple(points))
    with pytest.raises(FailedPrecondition, match=f"{value} of one 1.0, {value} of other 1.0"):
        load_backend("twin", {})
