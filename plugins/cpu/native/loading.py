"""Finds the step kernel: in the wheel, else in the cache, else compiled now, else none, with the reason."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from meshkit.modelstore import default_cache_dir
from meshkit.telemetry.logging import get_logger
from plugins.cpu.native.build import LIBRARY_NAME, BuildFailed, build_key, build_library, find_compiler
from plugins.cpu.native.library import StepLibrary

log = get_logger(__name__)

_PACKAGED = Path(__file__).parent / "lib" / LIBRARY_NAME


@dataclass(frozen=True)
class LoadedKernel:
    """library: None where there is none, and `problem` says why. origin: for people."""

    library: StepLibrary | None
    origin: str = ""
    problem: str = ""


@functools.cache
def load_kernel() -> LoadedKernel:
    """The library for this process. The first start on a host without a packaged one compiles it, which takes
    some seconds; it is kept in the user's cache by sources, compiler, flags and processor.
    """
    if _PACKAGED.exists():
        return _open(_PACKAGED, "built with the package")
    try:
        compiler = find_compiler()
        file = default_cache_dir() / "kernels" / build_key(compiler) / LIBRARY_NAME
        if not file.exists():
            begun = time.monotonic()
            build_library(file, compiler)
            log.info("step kernel compiled", file=str(file), compiler=compiler.version,
                     seconds=round(time.monotonic() - begun, 1))  # fmt: skip
    except (BuildFailed, OSError) as error:
        return LoadedKernel(None, problem=f"the step kernel is not built: {error}")
    return _open(file, f"compiled by {compiler.version}")


def _open(file: Path, origin: str) -> LoadedKernel:
    try:
        return LoadedKernel(StepLibrary(file), origin)
    except (OSError, AttributeError) as error:
        problem = f"the step kernel {file} does not load: {error}; remove it to have it built anew"
        return LoadedKernel(None, problem=problem)
