"""A service as the launcher sees one: takes a configuration, writes its ready file, ends at SIGTERM.

Put on PYTHONPATH under the names of the real services, so that the launcher's own behaviour shows at faults
that real services do not have on demand. What it does is in STAND_IN_BEHAVIOUR: by name, "die: LAST WORDS" or
"hang" (never ready); by default it serves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def _wait_for(file: Path) -> None:
    """Until the gateway serves: a death before would find it without its signal handling."""
    deadline = time.monotonic() + 30
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def serve(config_path: str) -> int:
    """Runs until SIGTERM; writes its name into `order` beside the ready files then."""
    config = json.loads(Path(config_path).read_text())
    ready_file = Path(config["ready_file"])
    name = ready_file.stem
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    behaviour = json.loads(os.environ["STAND_IN_BEHAVIOUR"]).get(name, "serve")
    print(json.dumps({"level": "info", "event": "starts", "name": name}), file=sys.stderr, flush=True)
    if behaviour.startswith("die: "):
        _wait_for(ready_file.with_name("gateway.json"))
        print(f"{name}: {behaviour.removeprefix('die: ')}", file=sys.stderr, flush=True)
        return 1
    for fraction in (0.0, 0.5, 1.0):
        event = {"level": "info", "event": "load_progress", "stage": "weights", "fraction": fraction}
        print(json.dumps(event), file=sys.stderr, flush=True)
    if behaviour != "hang":
        ready = {"service": name, "pid": os.getpid(), "address": "127.0.0.1:1", "http_address": "127.0.0.1:2"}
        temporary = ready_file.with_suffix(".part")
        temporary.write_text(json.dumps({**ready, "executor_pid": 12345}))
        temporary.rename(ready_file)
    signal.sigwait({signal.SIGTERM})
    with (ready_file.parent / "order").open("a") as order:
        order.write(f"{name}\n")
    return 0
