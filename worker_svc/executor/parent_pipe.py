"""The pipe to the supervisor: settings in, one ready line out, and the end of the executor when it closes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from io import FileIO
from typing import IO

EXIT_ORPHANED = 3
DRAIN_COMMAND = b"drain"


class ParentPipe:
    """stdin and stdout of an executor. The process may not outlive its parent: stdin's end is the sign.

    The parent's side closes with the parent, however that ends, SIGKILL included.
    """

    def __init__(self, source: FileIO, sink: IO[bytes]) -> None:
        self._source = source
        self._sink = sink
        self._ended = threading.Event()

    @classmethod
    def claim(cls) -> ParentPipe:
        """Take stdin and stdout for this pipe; what vendor runtimes print to stdout goes to stderr."""
        sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # Unbuffered: a buffered reader holds a lock while it waits, which an ending interpreter cannot take.
        return cls(os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False), sink)

    def read_line(self) -> bytes:
        """The next line, blocking; b"" at the end."""
        return self._source.readline()

    def say(self, message: Mapping[str, object]) -> None:
        """Send one line of JSON. A parent that has gone is no error: the end follows by stdin."""
        try:
            self._sink.write(json.dumps(message).encode() + b"\n")
            self._sink.flush()
        except BrokenPipeError:
            self._ended.set()

    def watch(self, *, on_drain: Callable[[], None], on_end: Callable[[], None], grace_s: float) -> None:
        """From now on call back, on a thread of its own, for each drain command and for the end of stdin.

        A process that still runs `grace_s` seconds after the end is ended by force: a hung device or event
        loop must not hold the chip.
        """

        def listen() -> None:
            while line := self._source.readline():
                if line.strip() == DRAIN_COMMAND:
                    on_drain()
            on_end()
            if not self._ended.wait(grace_s):
                os._exit(EXIT_ORPHANED)

        threading.Thread(target=listen, name="parent pipe", daemon=True).start()

    def close(self) -> None:
        """The process is about to end by itself."""
        self._ended.set()
