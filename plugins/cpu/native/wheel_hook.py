"""hatchling's hook: a wheel built where a C++ compiler is carries the step kernel, for that platform only."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILDER = Path("plugins/cpu/native/build.py")
_PLACE = "plugins/cpu/native/lib"


class StepKernelHook(BuildHookInterface[Any]):
    """Compiles before the wheel is packed. An editable install compiles its sources at its first start."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to the wheel; a warning where it cannot be built."""
        if version == "editable":
            return
        builder = _load_builder(Path(self.root) / _BUILDER)
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / builder.LIBRARY_NAME
        try:
            builder.build_library(library, builder.find_compiler())
        except builder.BuildFailed as error:
            self.app.display_warning(f"the wheel is without the step kernel of the cpu plugin: {error}")
            return
        build_data["force_include"][str(library)] = f"{_PLACE}/{builder.LIBRARY_NAME}"
        build_data["pure_python"] = False
        # No interpreter's interface is used: one wheel for every Python 3.
        build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The library is in the wheel now."""
        if self._folder is not None:
            self._folder.cleanup()


def _load_builder(file: Path) -> ModuleType:
    """By path: the package that it is in wants what is not installed when a wheel is built."""
    spec = importlib.util.spec_from_file_location("step_kernel_build", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _platform() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
