"""Services as real processes, each started from its own configuration file, as a deployment starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_S = 60.0


class Services:
    """By names of their own, since there may be several of a kind. Files and logs lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, kind: str, **config: Any) -> dict[str, Any]:
        """Start a service and wait until it is ready; what it wrote into its ready file."""
        process = self.spawn(name, kind, **config)
        ready, deadline = self._ready_file(name), time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, self.log(name)
            assert time.monotonic() < deadline, f"{name} was not ready in time: {self.log(name)}"
            time.sleep(0.02)
        content: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
        return content

    def spawn(self, name: str, kind: str, **config: Any) -> subprocess.Popen[bytes]:
        """Start a service and wait for nothing."""
        self._ready_file(name).unlink(missing_ok=True)
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps({"ready_file": str(self._ready_file(name)), **config}), encoding="utf-8")
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "meshkit.cli", kind, "--config", str(file)], stdout=log, stderr=log
            )
        return process

    def log(self, name: str) -> str:
        """What it has said."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the process to be gone."""
        process = self.running.pop(name)
        process.kill()
        assert process.wait(timeout=10) == -signal.SIGKILL

    def stop_all(self) -> None:
        """SIGTERM to all, the last one first; each must end with 0."""
        codes = {}
        for name in reversed(list(self.running)):
            self.running[name].terminate()
            codes[name] = self.running.pop(name).wait(timeout=30)
        assert not any(codes.values()), f"exit codes {codes}"

    def _ready_file(self, name: str) -> Path:
        return self.folder / f"{name}-ready.json"
