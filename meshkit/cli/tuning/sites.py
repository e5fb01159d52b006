"""Where settings are tried: a group of a mesh that runs, or a mesh of its own, started anew where needed."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from meshkit.cli.detach import run_detached
from meshkit.cli.events import Report
from meshkit.cli.options import GroupOptions, MeshOptions
from meshkit.cli.state import MeshRecord, ServiceKind, StateDir, reachable
from meshkit.cli.stopping import stop_mesh
from meshkit.cli.tuning.space import DEFAULT, Setting
from meshkit.cli.tuning.taken_group import Ceilings, TakenGroup, uninterrupted
from meshkit.errors import FailedPrecondition


class Site(Protocol):
    """gateway: HOST:PORT that the load goes to. group: as it is now. can_grow: whether more can be set than
    its replicas took when it was opened. has_windows: whether its step window can be changed.
    """

    gateway: str
    can_grow: bool
    has_windows: bool

    @property
    def group(self) -> TakenGroup: ...

    def open(self) -> None:
        """Makes it ready for the default. MeshError: it cannot be."""
        ...

    def apply(self, setting: Setting) -> bool:
        """Makes `setting` hold; True where all is cold: the first one, and after a start.

        Raises:
            MeshError: it cannot be set here.
        """
        ...

    def close(self, chosen: Setting | None) -> None:
        """Leaves `chosen`, or where it is None what was, and nothing else behind."""
        ...


class RunningGroup:
    """A group that serves. Its step window is the scheduler's own and stays."""

    can_grow = False
    has_windows = False

    def __init__(self, group: TakenGroup, *, gateway: str) -> None:
        self.gateway = gateway
        self.group = group
        self._is_cold = True
        self._is_taken = False

    def open(self) -> None:
        """See Site."""
        self.group.take()
        self._is_taken = True

    def apply(self, setting: Setting) -> bool:
        """See Site."""
        self.group.apply(setting)
        was_cold, self._is_cold = self._is_cold, False
        return was_cold

    def close(self, chosen: Setting | None) -> None:
        """See Site."""
        if not self._is_taken:
            return
        if chosen is not None:
            self.group.apply(chosen)
        else:
            self.group.put_back()


class OwnMesh:
    """A mesh of one group, in a state folder of its own. It is started again for another window, and for more
    than its replicas take; all else is set while it runs.

    options: of the mesh but its groups. report: gets the events of each start.
    """

    has_windows = True

    def __init__(self, base: GroupOptions, options: MeshOptions, *, report: Report) -> None:
        self.gateway = ""
        self.can_grow = True
        self._base = base
        self._options = options
        self._report = report
        self._state = StateDir(Path(tempfile.mkdtemp(prefix="chipmesh-tune-")))
        self._group: TakenGroup | None = None
        self._is_cold = True
        self._started = DEFAULT
        """What it was started with beyond `base`."""
        self._default = Ceilings()
        """What `base` came to, and the most that can be set without a start for more."""

    @property
    def group(self) -> TakenGroup:
        """Raises FailedPrecondition: it does not run."""
        if self._group is None:
            raise FailedPrecondition("the mesh to tune is not running")
        return self._group

    def open(self) -> None:
        """See Site."""
        self._start(DEFAULT)
        self._default = self.group.effective
        self.can_grow = self.group.uniform

    def apply(self, setting: Setting) -> bool:
        """See Site."""
        wanted = Setting(
            _grown(
                self._started.chunked_prefill_size, setting.chunked_prefill_size, self._default.chunk_tokens
            ),
            _grown(
                self._started.max_running_requests,
                setting.max_running_requests,
                self._default.max_running_requests,
            ),
            setting.step_window_s,
        )
        if self._group is None or wanted != self._started:
            self._start(wanted)
        self.group.apply(setting)
        was_cold, self._is_cold = self._is_cold, False
        return was_cold

    def close(self, chosen: Setting | None) -> None:
        """See Site."""
        del chosen
        with uninterrupted():
            self._stop()
            shutil.rmtree(self._state.root, ignore_errors=True)

    def _start(self, setting: Setting) -> None:
        self._stop()
        self._state.prepare()
        own = {name: value for name, value in asdict(setting).items() if value is not None}
        options = self._options.model_copy(update={"groups": (self._base.model_copy(update=own),)})
        mesh = run_detached(options, state=self._state, report=self._report)
        self.gateway = _address(mesh, "gateway")
        group = TakenGroup(_address(mesh, "scheduler"), self._base.name)
        group.take()
        if self._default != Ceilings():
            group.keep(self._default)
        self._group, self._started, self._is_cold = group, setting, True

    def _stop(self) -> None:
        self._group = None
        stop_mesh(self._state, report=self._report)


def _grown(started: int | None, wanted: int | None, default: int) -> int | None:
    """What a mesh has to be started with: what it was, unless that is less than wanted."""
    return started if wanted is None or wanted <= (started or default) else wanted


def _address(mesh: MeshRecord, kind: ServiceKind) -> str:
    return reachable(str(mesh.of_kind(kind)[0].address))
