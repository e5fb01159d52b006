"""Ends a run whose check hangs. A native call that hangs cannot be interrupted: the report is written without
it, and the process ends.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LAST_RESORT_S = 5.0
"""A call that hangs with the interpreter's lock lets no thread of ours run; faulthandler's needs no lock. It
prints where each thread is and ends the process with exit code 1, this much after the limit.
"""
_STDERR = 2
"""The descriptor itself: sys.stderr may have been replaced by something without one."""


@dataclass(frozen=True)
class TimeLimit:
    """How long one check may take, in seconds, and what is done with the name of one that takes longer.

    on_hang: called once, on a thread of its own, while the check still runs. For `chipmesh conformance` it
    writes the report and ends the process.
    """

    seconds: float
    on_hang: Callable[[str], None]

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Run one check inside: it ends in time, or `on_hang` is called with `name`."""
        lock = threading.Lock()
        ended = threading.Event()

        def give_up() -> None:
            # A check that ends now waits for the lock: what is reported as a hang is reported once.
            with lock:
                if not ended.is_set():
                    self.on_hang(name)

        timer = threading.Timer(self.seconds, give_up)
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(self.seconds + _LAST_RESORT_S, exit=True, file=_STDERR)
        try:
            yield
        finally:
            with lock:
                ended.set()
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
