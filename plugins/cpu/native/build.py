"""Builds the step kernel's shared library with the host's C++ compiler. Imports the standard library only: it
also runs when the wheel is built.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY_NAME = "libchipmesh_cpu.so"
_COMPILERS = ("c++", "g++", "clang++")
_PLAIN = ("threads", "model", "step", "sampling", "api")
_FLAGS = (
    "-std=c++17",
    "-O3",
    # Only what says fma is fused, so that every instruction set rounds alike.
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
_X86 = ("x86_64", "amd64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)
_VARIANTS: Mapping[str, Sequence[str]] = {
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""Instruction sets beside the compiler's own baseline, which has NEON on arm64."""
_COMPILE_TIMEOUT_S = 300.0


class BuildFailed(Exception):
    """The library cannot be built here; the text says why and what to do."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. command: with its own arguments, as CXX may carry them. version: its first line."""

    command: tuple[str, ...]
    version: str


def find_compiler(cxx: str = "") -> Compiler:
    """The compiler that `cxx` (the value of CXX) names, else the first of c++, g++ and clang++.

    Raises:
        BuildFailed: there is none, or it does not start.
    """
    named = shlex.split(cxx)
    if not named:
        found = next((path for path in map(shutil.which, _COMPILERS) if path), None)
        if found is None:
            raise BuildFailed(
                f"no C++ compiler ({', '.join(_COMPILERS)}) is on PATH; install one, or a wheel with kernels"
            )
        named = [found]
    done = _run([*named, "--version"])
    return Compiler(tuple(named), (done.splitlines() or ["unknown"])[0])


def build_key(compiler: Compiler) -> str:
    """16 hex digits that change with the sources, the compiler, the flags or the kind of processor."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    words = (*compiler.command, compiler.version, *_FLAGS, *map(str, _variants().items()), platform.machine())
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:16]


def build_library(target: Path, compiler: Compiler) -> None:
    """Write the shared library to `target`, whole or not at all; several processes may do it at once.

    Raises:
        BuildFailed: the compiler's message is in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        jobs = _jobs(Path(folder), compiler)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            # All are waited for: the folder must outlive the last compiler.
            for made in [pool.submit(_run, job) for job in jobs.values()]:
                made.result()
        library = Path(folder) / LIBRARY_NAME
        _run([*compiler.command, "-shared", "-pthread", *map(str, jobs), "-o", str(library)])
        library.replace(target)


def _jobs(folder: Path, compiler: Compiler) -> dict[Path, list[str]]:
    """The compiler's command for each object file; the longest first."""
    variants = _variants()
    has = [f"-DCHIPMESH_HAS_{name.upper()}" for name in variants]
    jobs: dict[Path, list[str]] = {}

    def add(source: str, name: str, *flags: str) -> None:
        made = folder / f"{name}.o"
        file = str(SOURCES / f"{source}.cpp")
        jobs[made] = [*compiler.command, *_FLAGS, *flags, "-c", file, "-o", str(made)]

    for name, flags in {**variants, "baseline": ()}.items():
        add("kernels", f"kernels_{name}", f"-DCHIPMESH_KERNELS={name}", *flags)
    for source in _PLAIN:
        add(source, source, *has)
    return jobs


def _variants() -> Mapping[str, Sequence[str]]:
    return _VARIANTS if platform.machine().lower() in _X86 else {}


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMPILE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout
