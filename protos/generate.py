#!/usr/bin/env python3
"""Generates the `chipmesh` Python package from protos/chipmesh/**/*.proto, beside the .proto files.

`python protos/generate.py` writes; `--check` generates into a temporary folder, names every file that
differs, is missing or has no source any more, and exits 1. Standard library only: the compiler lives in its
own environment, made on first use, because its output must import on protobuf 6.33 (which the images of chip
vendors carry) while our own environment runs protobuf 7.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
PACKAGE = "chipmesh"
TOOLS_ENVIRONMENT = ROOT / ".venv-protos"
# The output of grpcio-tools 1.81.x imports on protobuf 6.33.5 and newer, 7 included; 1.85's refuses 6.
# grpcio and protobuf are pinned to the floor that our package promises: tests import the output on it.
TOOLS = {
    "grpcio-tools": "1.81.1",
    "grpcio": "1.81.1",
    "protobuf": "6.33.5",
    "mypy-protobuf": "5.1.0",
    # mypy-protobuf asks for these without an upper bound; pinned so that all machines have the same.
    "types-protobuf": "7.35.1.20260906",
}
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
PACKAGE_MARKER = '"""Generated package: protos/generate.py writes everything here but the .proto files."""\n'


class GenerationError(Exception):
    """The tools could not be installed or refused the .proto files; the text says which and what to do."""


def tools_python() -> Path:
    """The interpreter of the tools' environment, which need not exist yet."""
    return TOOLS_ENVIRONMENT / "bin" / "python"


def installed_versions() -> dict[str, str]:
    """Versions of the tools in their environment; absent ones are left out. Empty without an environment."""
    if not tools_python().exists():
        return {}
    script = (
        "import importlib.metadata as m, sys\n"
        "name = lambda d: (d.metadata['Name'] or '').lower().replace('_', '-')\n"
        "have = {name(d): d.version for d in m.distributions()}\n"
        "[print(n, have[n]) for n in sys.argv[1:] if n in have]"
    )
    result = subprocess.run(
        [tools_python(), "-c", script, *TOOLS], capture_output=True, text=True, check=False
    )
    return dict(line.split() for line in result.stdout.splitlines())


def ensure_tools() -> None:
    """Creates the tools' environment unless it holds exactly the pinned versions.

    Raises GenerationError when pip cannot install them.
    """
    if installed_versions() == TOOLS:
        return
    started = time.monotonic()
    print(
        f"protos: installing {', '.join(map('=='.join, TOOLS.items()))} into {TOOLS_ENVIRONMENT.name}",
        flush=True,
    )
    venv.create(TOOLS_ENVIRONMENT, with_pip=True, clear=TOOLS_ENVIRONMENT.exists())
    requirements = [f"{name}=={version}" for name, version in TOOLS.items()]
    command = [
        str(tools_python()),
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        *requirements,
    ]
    if subprocess.run(command, check=False).returncode != 0 or installed_versions() != TOOLS:
        raise GenerationError(
            f"the proto tools could not be installed at their pinned versions {TOOLS} (found "
            f"{installed_versions()}); pip's own message is above: check the network or the package index, "
            "then run this again"
        )
    print(f"protos: tools installed in {time.monotonic() - started:.0f} s", flush=True)


def proto_files() -> list[str]:
    """Paths of all .proto files relative to protos/, sorted: the output never depends on the file system."""
    return sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).rglob("*.proto"))


def compile_into(destination: Path) -> None:
    """Runs protoc over all .proto files, adds the package markers; raises GenerationError when it refuses."""
    sources = proto_files()
    if not sources:
        raise GenerationError(f"no .proto file below {PROTOS / PACKAGE}")
    outputs = [f"--{plugin}_out={destination}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    environment = {**os.environ, "PATH": f"{tools_python().parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(tools_python()), "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        raise GenerationError(f"protoc refused the contract:\n{result.stderr.strip()}")
    if result.stderr.strip() and "Writing mypy" not in result.stderr:
        print(result.stderr.strip(), file=sys.stderr)
    for folder in {destination / source for source in sources}:
        write_package_markers(folder.parent, destination)


def write_package_markers(folder: Path, top: Path) -> None:
    """Writes `__init__.py` into `folder` and the folders up to `top` (exclusive), and one py.typed."""
    while folder != top:
        (folder / "__init__.py").write_text(PACKAGE_MARKER)
        if folder.parent == top:
            (folder / "py.typed").write_text("")
        folder = folder.parent


def generated_files(top: Path) -> dict[str, Path]:
    """Generated files below `top`/chipmesh by their path relative to `top`."""
    files = (path for path in (top / PACKAGE).rglob("*") if path.is_file())
    return {
        path.relative_to(top).as_posix(): path
        for path in files
        if path.name.endswith(GENERATED_SUFFIXES) or path.name in ("__init__.py", "py.typed")
    }


def stale_files(fresh_top: Path) -> list[str]:
    """One line for each file that is missing, has no source any more, or differs from the fresh output."""
    fresh, committed = generated_files(fresh_top), generated_files(PROTOS)
    lines = [f"missing: protos/{name}" for name in sorted(fresh.keys() - committed.keys())]
    lines += [f"without a source: protos/{name}" for name in sorted(committed.keys() - fresh.keys())]
    lines += [
        f"stale: protos/{name}"
        for name in sorted(fresh.keys() & committed.keys())
        if fresh[name].read_bytes() != committed[name].read_bytes()
    ]
    return lines


def write_generated(fresh_top: Path) -> int:
    """Brings the committed files to the fresh output, touching only what differs; returns how many."""
    fresh, committed = generated_files(fresh_top), generated_files(PROTOS)
    changed = 0
    for name, path in fresh.items():
        if name not in committed or committed[name].read_bytes() != path.read_bytes():
            shutil.copyfile(path, PROTOS / name)
            changed += 1
    for name in committed.keys() - fresh.keys():
        committed[name].unlink()
        changed += 1
    return changed


def main() -> int:
    """Exit codes: 0 done or fresh, 1 stale or refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 naming the files that are stale"
    )
    check: bool = parser.parse_args().check
    try:
        ensure_tools()
        with tempfile.TemporaryDirectory(prefix="chipmesh-protos-") as scratch:
            compile_into(Path(scratch))
            stale = stale_files(Path(scratch))
            if not check:
                changed = write_generated(Path(scratch))
                print(f"protos: {len(proto_files())} .proto files compiled, {changed} files changed")
                return 0
    except GenerationError as error:
        print(f"protos: {error}", file=sys.stderr)
        return 1
    if stale:
        print(
            "\n".join([*stale, "protos: run `python protos/generate.py` and commit what it writes"]),
            file=sys.stderr,
        )
        return 1
    print(f"protos: the generated code of {len(proto_files())} .proto files is fresh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
