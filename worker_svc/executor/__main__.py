"""`python -m worker_svc.executor`: settings from stdin, a ready line or an error line to stdout."""

from __future__ import annotations

import gc
import sys

from worker_svc.executor.parent_pipe import ParentPipe


def main() -> int:
    """Run one executor to its end; returns the exit code."""
    # Libraries are made of objects that stay: `spare_the_collector` sets it to work once they are loaded.
    gc.disable()
    pipe = ParentPipe.claim()
    try:
        # Late, so that an interpreter that lacks a library says so to the supervisor in one line.
        from worker_svc.executor.app import run_executor  # noqa: PLC0415
    except ImportError as error:
        pipe.say({"error": {
            "code": "FAILED_PRECONDITION",
            "reason": "IMPORT_FAILED",
            "message": f"interpreter {sys.executable} cannot import the executor: {error}. "
            "Install what is missing "
            "there, or set executor.python to another interpreter",
            "field": "executor.python",
        }})  # fmt: skip
        return 1
    return run_executor(pipe)


if __name__ == "__main__":
    sys.exit(main())
