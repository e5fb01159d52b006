"""A service process of the mesh that loses messages where it is told to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshkit.cli.child import Child
from meshkit.cli.state import ServiceKind, StateDir


class FaultyChild(Child):
    """As Child, by way of chaos.faulty_service. faults: folder of its message faults."""

    def __init__(
        self, name: str, kind: ServiceKind, *, config: Mapping[str, Any], state: StateDir, faults: Path
    ) -> None:
        self._faults = faults
        super().__init__(name, kind, config=config, state=state)

    def _spawn(self, config_file: Path) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "chaos.faulty_service", self.kind,
            "--config", str(config_file), "--faults", str(self._faults),
        ]  # fmt: skip
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
