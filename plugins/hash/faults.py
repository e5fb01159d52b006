"""Faults of a chip on request, for tests of the mesh: named by files, or by a prompt's first token."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from meshkit.errors import InvalidArgument, ResourceExhausted
from plugins.hash.options import HashOptions
from plugins.sdk.runner import StepBatch

TAKEN = ".taken"
"""Suffix of the file once its fault is about to happen: the proof for whoever asked."""


class ChipFaults:
    """Looks before each load and step whether it is to go wrong."""

    def __init__(self, options: HashOptions) -> None:
        self._memory = Path(options.memory_file) if options.memory_file else None
        self._taken: TextIO | None = None
        self._file = Path(options.fault_file) if options.fault_file else None
        self._deadly_tokens = options.die_on_token
        self._deadly_slots: dict[int, int] = {}
        """Slots of requests that kill, and at which position."""

    def before_load(self) -> None:
        """Take the chip's memory for the life of this process, where there is a file that stands for it.

        Raises:
            ResourceExhausted: another process has it.
        """
        if self._memory is None or self._taken is not None:
            return
        file = self._memory.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ResourceExhausted(
                f"the chip's memory ({self._memory}) is taken by another process",
                reason="OUT_OF_DEVICE_MEMORY",
            ) from None
        self._taken = file

    def admitted(self, slot: int) -> None:
        """Another request is in the slot now."""
        self._deadly_slots.pop(slot, None)

    def _is_deadly(self, batch: StepBatch) -> bool:
        """Judged by the first token alone: a replayed request brings its own output, which may hold any."""
        for row in batch.prefill:
            if row.start == 0 and (position := self._deadly_tokens.get(int(row.token_ids[0]))) is not None:
                self._deadly_slots[row.slot] = position
        reached = [(row.slot, row.start + len(row.token_ids) - 1) for row in batch.prefill]
        if batch.decode is not None:
            reached += zip(batch.decode.slots.tolist(), batch.decode.positions.tolist(), strict=True)
        return any(position >= self._deadly_slots.get(slot, position + 1) for slot, position in reached)

    def before_step(self, batch: StepBatch) -> None:
        """Do what is asked for: hang, die or raise; mostly nothing.

        Raises:
            ResourceExhausted: the fault is out_of_memory. InvalidArgument: the file names none.
        """
        if self._deadly_tokens and self._is_deadly(batch):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._file is not None and (fault := _take(self._file)):
            if fault not in FAULTS:
                raise InvalidArgument(
                    f"{self._file} asked for {fault!r}; there is {', '.join(FAULTS)}",
                    field="backend_options.fault_file",
                )
            FAULTS[fault]()


def _take(file: Path) -> str:
    """The fault that the file names; "" without a file. It counts once: the file is moved away."""
    if not file.exists():
        return ""
    taken = file.with_name(file.name + TAKEN)
    file.rename(taken)
    return taken.read_text(encoding="utf-8").strip()


def _hang_step() -> None:
    """The device thread never returns; the event loop and the RPC server go on."""
    threading.Event().wait()


def _hang_loop() -> None:
    """The main thread, which runs the event loop, never comes back; gRPC's own threads still answer pings."""
    # What the interpreter calls on its main thread, as it does the handlers of signals.
    ctypes.pythonapi.Py_AddPendingCall(_SLEEP_FOR_EVER, None)


def _sleep_for_ever(_: int | None) -> int:
    while True:
        time.sleep(3600)


def _run_out_of_memory() -> None:
    raise ResourceExhausted("the device has no memory left for this step", reason="OUT_OF_DEVICE_MEMORY")


# Kept for the life of the process: the interpreter holds no reference of its own.
_SLEEP_FOR_EVER = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_sleep_for_ever)

FAULTS: dict[str, Callable[[], None]] = {
    "hang_step": _hang_step,
    "hang_loop": _hang_loop,
    "out_of_memory": _run_out_of_memory,
}
