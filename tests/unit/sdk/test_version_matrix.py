"""What does not go together is refused at load, with both sides named."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from meshkit.errors import FailedPrecondition
from plugins.sdk import registry
from plugins.sdk.backend import Backend
from plugins.sdk.load_failure import describe_failure, find_unresolved_symbol
from plugins.sdk.registry import load_backend, register_backend
from plugins.sdk.versions import version_in_range
from tests.unit.sdk.toy_backend import ToyBackend, toy_factory


@pytest.fixture(autouse=True)
def _own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.parametrize(
    ("changes", "wanted", "found"),
    [
        ({"contract_range": ">=2.0,<3"}, ">=2.0,<3", "1.0"),
        ({"contract_version": "2.0"}, "2.0", "1.0"),
        ({"runtime_version": "5.0.21.26", "runtime_range": ">=5.19"}, ">=5.19", "5.0.21.26"),
        ({"collective_library_version": "2.9", "collective_library_range": ">=3.1,<4"}, ">=3.1,<4", "2.9"),
        ({"framework_version": "2.13.0+cpu", "framework_range": ">=2.5,<2.6"}, ">=2.5,<2.6", "2.13.0+cpu"),
    ],
)
def test_each_part_is_checked_with_both_versions_named(
    changes: dict[str, str], wanted: str, found: str
) -> None:
    register_backend("toy", toy_factory(**changes))
    with pytest.raises(FailedPrecondition) as caught:
        load_backend("toy", {})
    assert caught.value.reason == "VERSION_MISMATCH"
    assert (caught.value.metadata["wanted"], caught.value.metadata["found"]) == (wanted, found)
    assert wanted in caught.value.message
    assert found in caught.value.message


def test_a_version_may_be_left_out_of_a_range() -> None:
    assert not version_in_range("5.19.dev1+g1", ">=5,!=5.19")
    assert version_in_range("5.20", ">=5,!=5.19")


def test_a_library_with_an_unresolved_symbol_is_refused_by_name(tmp_path: Path) -> None:
    library = tmp_path / "libvendor.so"
    if (gcc := shutil.which("gcc")) is not None:
        source = "int vendor_new_call(void); int use(void) { return vendor_new_call(); }"
        command = [gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)

    def load(options: Mapping[str, str]) -> Backend:
        if gcc is None:
            raise ImportError(f"{library}: undefined symbol: vendor_new_call")
        ctypes.CDLL(str(library))
        raise AssertionError("the library was loaded")

    register_backend("toy", load)
    with pytest.raises(FailedPrecondition) as caught:
        load_backend("toy", {})
    metadata = caught.value.metadata
    assert (metadata["library"], metadata["symbol"]) == (str(library), "vendor_new_call")
    assert "running here: contract 1.0, Python 3" in caught.value.message


def test_what_the_package_was_built_for_is_named(tmp_path: Path) -> None:
    info = tmp_path / "vendor-2.1.dist-info"
    info.mkdir()
    requires = "Requires-Dist: numpy<1.0\nRequires-Dist: nobody-has-this>=4\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vendor\nVersion: 2.1\n{requires}")
    text = describe_failure(ImportError("/x/ops.so: undefined symbol: _ZN3c10"), Distribution.at(info))
    assert "vendor 2.1 was built for numpy <1.0 (here " in text
    assert "nobody-has-this >=4 (here not installed)" in text


def test_a_missing_symbol_version_and_a_wrapped_error_are_recognised() -> None:
    glibc = OSError("/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /x/ops.so)")
    wrapped = RuntimeError("the plugin cannot start")
    wrapped.__cause__ = glibc
    found = find_unresolved_symbol(wrapped)
    assert found is not None
    assert (found.library, found.symbol) == ("/x/ops.so", "GLIBCXX_3.4.30")
    assert find_unresolved_symbol(RuntimeError("out of memory")) is None


def test_an_entry_point_that_ends_the_interpreter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits_at_import.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("quits", "quits_at_import:backend", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: (point,))
    with pytest.raises(FailedPrecondition, match="cannot be imported: SystemExit: 3"):
        load_backend("quits", {})


def test_two_plugins_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = tuple(EntryPoint("twin", f"{x}.plugin:backend", registry.ENTRY_POINT_GROUP) for x in "ab")
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(FailedPrecondition, match=r"a\.plugin:backend, b\.plugin:backend") as caught:
        load_backend("twin", {})
    assert caught.value.reason == "BACKEND_AMBIGUOUS"


def test_a_plugin_that_cannot_say_who_it_is_is_refused() -> None:
    register_backend("toy", lambda options: ToyBackend(None))  # type: ignore[arg-type]
    with pytest.raises(FailedPrecondition, match=r"returned NoneType, not a plugins\.sdk PluginInfo"):
        load_backend("toy", {})
