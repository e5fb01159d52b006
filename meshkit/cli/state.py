"""The state folder of one mesh: its files, its lock, and mesh.json, which says what runs where."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from meshkit.cli.processes import ProcessRecord, is_alive
from meshkit.config import FrozenConfig
from meshkit.errors import AlreadyExists, FailedPrecondition

STATE_DIR_VARIABLE = "CHIPMESH_STATE_DIR"
ServiceKind = Literal["scheduler", "gateway", "worker"]


class ServiceRecord(FrozenConfig):
    """One service process.

    name: "worker-0" and so on. address, http_address: bound ones, None until ready. details: what else its
    ready file says, for instance a worker's executor_pid and instance_id.
    """

    name: str
    kind: ServiceKind
    process: ProcessRecord
    address: str | None = None
    http_address: str | None = None
    log: Path
    details: dict[str, Any] = Field(default_factory=dict)


class MeshRecord(FrozenConfig):
    """mesh.json: the launcher, its services in the order of their start, and what clients need to know."""

    phase: Literal["starting", "ready"]
    launcher: ProcessRecord
    model: str
    otlp_endpoint: str | None = None
    services: tuple[ServiceRecord, ...] = ()

    def of_kind(self, kind: ServiceKind) -> list[ServiceRecord]:
        """Services of one kind."""
        return [service for service in self.services if service.kind == kind]

    def is_live(self) -> bool:
        """True while the launcher or any service runs."""
        return is_alive(self.launcher) or any(is_alive(service.process) for service in self.services)


class StateDir:
    """Paths below one folder, and the record of the mesh that lives in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mesh_file = root / "mesh.json"
        self.launch_log = root / "logs" / "up.log"
        self.options_file = root / "config" / "up.json"

    def config_file(self, name: str) -> Path:
        """Configuration of the service called `name`."""
        return self.root / "config" / f"{name}.json"

    def ready_file(self, name: str) -> Path:
        """Written by the service called `name` when it can serve."""
        return self.root / "ready" / f"{name}.json"

    def log_file(self, name: str) -> Path:
        """stdout and stderr of the service called `name`."""
        return self.root / "logs" / f"{name}.log"

    def prepare(self) -> None:
        """Makes the folders, private to the user: configurations may hold secrets.

        Raises:
            FailedPrecondition: they cannot be made.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in ("config", "ready", "logs"):
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"state folder {self.root} cannot be used: {error.strerror}; "
                f"set {STATE_DIR_VARIABLE} to another one",
                field=STATE_DIR_VARIABLE,
            ) from error

    def read_mesh(self) -> MeshRecord | None:
        """What mesh.json says, whether or not it still runs; None without one.

        Raises:
            FailedPrecondition: the file is no record of a mesh.
        """
        try:
            return MeshRecord.model_validate_json(self.mesh_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise FailedPrecondition(
                f"{self.mesh_file} is damaged or of another version; end its processes, then remove it"
            ) from error

    def write_mesh(self, record: MeshRecord) -> None:
        """Replaces mesh.json in one step."""
        temporary = self.mesh_file.with_suffix(".tmp")
        temporary.write_text(record.model_dump_json(indent=2), encoding="utf-8")
        os.replace(temporary, self.mesh_file)

    def forget_mesh(self) -> None:
        """Removes mesh.json."""
        self.mesh_file.unlink(missing_ok=True)

    def refuse_live_mesh(self) -> None:
        """Raises AlreadyExists while a mesh of this folder, or a part of one, runs."""
        record = self.read_mesh()
        if record is not None and record.is_live():
            raise AlreadyExists(
                f"a mesh with state in {self.root} is up already (launcher pid {record.launcher.pid}); "
                f"stop it with `chipmesh down`, or set {STATE_DIR_VARIABLE} to another folder for another"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for one launcher; raises AlreadyExists when another holds it."""
        with (self.root / "lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyExists(
                    f"another `chipmesh up` is at work in {self.root}; stop it with `chipmesh down`, "
                    f"or set {STATE_DIR_VARIABLE} to another folder"
                ) from error
            self.refuse_live_mesh()
            yield


def state_dir_from_environment() -> StateDir:
    """CHIPMESH_STATE_DIR, else ~/.local/state/chipmesh. Read at each call, never at import."""
    own = os.environ.get(STATE_DIR_VARIABLE)
    root = Path(own).expanduser() if own else Path.home() / ".local" / "state" / "chipmesh"
    return StateDir(root.absolute())


def environment_prefix(state: StateDir) -> str:
    """What a person types before a command to mean this folder: empty for the default one."""
    if state.root == (Path.home() / ".local" / "state" / "chipmesh").absolute():
        return ""
    return f"{STATE_DIR_VARIABLE}={shlex.quote(str(state.root))} "


def reachable(address: str) -> str:
    """The address a local client dials: a wildcard host is no destination, loopback is."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::") else address


def require_endpoint(state: StateDir, *, kind: ServiceKind, given: str | None) -> str:
    """The address of the mesh's gateway or scheduler: `given` by the user, else from mesh.json.

    Raises:
        FailedPrecondition: no mesh is up here and none was named.
    """
    if given:
        return given
    record = state.read_mesh()
    services = record.of_kind(kind) if record is not None and record.is_live() else []
    if not services or services[0].address is None:
        raise FailedPrecondition(
            f"no mesh is up with state in {state.root}; start one with `chipmesh up --model-path ...`, "
            f"name its {kind} with --endpoint HOST:PORT, or set {STATE_DIR_VARIABLE}",
            reason="MESH_NOT_UP",
        )
    return reachable(services[0].address)
