"""Wall clocks that can be set for one process: a small C library, loaded before libc, adds an offset to them.

Needs no privileges, and whatever of the process asks libc sees one clock: Python, and gRPC's C core, too.
Monotonic clocks are as they were, as they are when an operator sets the time of a machine.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from chaos.processes import FaultDidNotHappen
from meshkit.cli.processes import ProcessRecord

SOURCE = Path(__file__).with_name("clocks.c")
FOLDER_VARIABLE = "CHIPMESH_CHAOS_CLOCKS"
_RECORD = struct.Struct("=qQ")
"""Offset in nanoseconds; readings that had it."""


class Clocks:
    """The clocks of the processes that were started with `environment()`. folder: one record for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"<Clocks in {self._folder}>"

    def environment(self) -> dict[str, str]:
        """Variables for a new process; builds the library at the first call.

        Raises:
            FaultDidNotHappen: there is no C compiler here.
        """
        library = self._folder / "clocks.so"
        if not library.exists():
            self._build(library)
        return {"LD_PRELOAD": str(library), FOLDER_VARIABLE: str(self._folder)}

    def _build(self, library: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise FaultDidNotHappen("no C compiler (cc) is here, which a process' own clock needs")
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    def set(self, process: ProcessRecord, *, offset_s: float) -> None:
        """Set a process' wall clock to the true time plus `offset_s` seconds, at once."""
        with self._record(process) as record:
            _RECORD.pack_into(record, 0, int(offset_s * 1e9), 0)

    def readings(self, process: ProcessRecord) -> int:
        """How often a process has read a wall clock that was not the true one, since it was set last."""
        with self._record(process) as record:
            return int(_RECORD.unpack_from(record, 0)[1])

    @contextmanager
    def _record(self, process: ProcessRecord) -> Iterator[mmap.mmap]:
        path = self._folder / str(process.pid)
        if not path.exists():
            raise FaultDidNotHappen(f"process {process.pid} has no clock of its own: {path} is missing")
        with path.open("r+b") as file, mmap.mmap(file.fileno(), _RECORD.size) as record:
            yield record


@contextmanager
def variables(added: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment for processes that are started inside of the block."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
