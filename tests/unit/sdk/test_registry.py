"""The chosen back end is loaded and no other; what cannot be loaded says why and what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from meshkit.errors import FailedPrecondition, InvalidArgument
from plugins.sdk import registry
from plugins.sdk.registry import UnknownBackend, list_backends, load_backend, register_backend
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
