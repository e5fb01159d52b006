"""Which services the doctor looks at: from their configuration files and the ready files these name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from meshkit.address import UnixAddress, parse_listen
from meshkit.cli.doctor.facts import Target
from meshkit.cli.doctor.proc import Proc
from meshkit.cli.state import ServiceKind, StateDir, reachable
from meshkit.config import load_config
from meshkit.errors import FailedPrecondition, MeshError

# By name: meshkit sits below the services. An image of one service has not the others' models.
MODELS = {
    "gateway": ("gateway.config", "GatewayConfig"),
    "scheduler": ("scheduler_svc.config", "SchedulerConfig"),
    "worker": ("worker_svc.config", "WorkerConfig"),
}


class _AnyConfig(BaseModel):
    """Reads a file, or a folder of them, without asking what it says."""

    model_config = ConfigDict(extra="allow")


def find_targets(
    *,
    state: StateDir,
    proc: Proc,
    endpoint: str | None,
    gateway: str | None,
    configs: Sequence[Path],
) -> tuple[Target, ...]:
    """The mesh of `up` in `state`, unless `endpoint` names another scheduler; and what `configs` describe.

    Raises:
        FailedPrecondition: nothing is named, and no mesh is up here.
    """
    files = [*([] if endpoint else _files_of_up(state)), *configs]
    targets = [read_target(file, proc=proc) for file in dict.fromkeys(path.absolute() for path in files)]
    known = {target.address for target in targets}
    if endpoint and endpoint not in known:
        targets.insert(0, Target("scheduler", "scheduler", address=endpoint))
    elif not any(target.kind == "scheduler" for target in targets):
        targets += _scheduler_of(targets)
    if gateway and gateway not in known:
        targets.append(Target(f"gateway at {gateway}", "gateway", address=gateway))
    if not targets:
        raise FailedPrecondition(
            f"no mesh is up with state in {state.root}; start one with `chipmesh up --model-path ...`, name "
            "its scheduler with --endpoint HOST:PORT, or its services' files with --config FILE",
            reason="MESH_NOT_UP",
        )
    return _with_own_names(targets)


def _files_of_up(state: StateDir) -> list[Path]:
    record = state.read_mesh()
    if record is None or not record.is_live():
        return []
    return [state.config_file(service.name) for service in record.services]


def _scheduler_of(targets: Sequence[Target]) -> list[Target]:
    """Where gateways and workers say that it is."""
    addresses = dict.fromkeys(
        str(target.config["scheduler_address"])
        for target in targets
        if target.config.get("scheduler_address")
    )
    return [Target("scheduler", "scheduler", address=address) for address in list(addresses)[:1]]


def _with_own_names(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Two services of one name are told apart by their files."""
    names = [target.name for target in targets]
    return tuple(
        target
        if names.count(target.name) == 1
        else Target(**{**target.__dict__, "name": f"{target.name} ({target.config_file or target.address})"})
        for target in targets
    )


def read_target(file: Path, *, proc: Proc) -> Target:
    """One service by its configuration; what is wrong with that is kept, not raised."""
    try:
        raw = load_config(_AnyConfig, file).model_dump()
    except MeshError as error:
        return Target(file.stem, "scheduler", config_file=file, config_error=error.message)
    kind = _kind_of(raw)
    config, problem = _effective(kind, file, raw)
    ready = _read_ready(config.get("ready_file"), proc=proc)
    return Target(
        name=_name_of(kind, file, raw),
        kind=kind,
        address=ready.get("address") or _fixed(config, "listen"),
        http_address=ready.get("http_address") or _fixed(config, "http_listen"),
        openai_address=ready.get("openai_address")
        or (_fixed(config, "openai_listen") if config.get("openai_listen") else None),
        executor_address=ready.get("executor_address"),
        pid=ready.get("pid"),
        executor_pid=ready.get("executor_pid"),
        config_file=file,
        config=config,
        config_error=problem,
    )


def _kind_of(raw: Mapping[str, Any]) -> ServiceKind:
    """By the fields that only one of them has."""
    if "worker_id" in raw:
        return "worker"
    return "gateway" if "models" in raw else "scheduler"


def _name_of(kind: ServiceKind, file: Path, raw: Mapping[str, Any]) -> str:
    if kind == "worker":
        return str(raw["worker_id"])
    return file.stem if file.is_file() and kind in file.stem else kind


def _effective(kind: ServiceKind, file: Path, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """With all defaults, as the service itself reads it (secrets masked); and what is wrong with it."""
    module_name, class_name = MODELS[kind]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return raw, None  # An image of another service: the fields that are written are all that is known.
    try:
        model = load_config(cast("type[BaseModel]", getattr(module, class_name)), file)
    except MeshError as error:
        return raw, error.message
    return model.model_dump(mode="json"), None


def _read_ready(file: object, *, proc: Proc) -> Mapping[str, Any]:
    """What the service wrote when it was ready; nothing where it has not, or the file is no JSON."""
    if not file:
        return {}
    try:
        ready = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(ready, dict):
        return {}
    return {**ready, **{name: reachable(str(ready[name])) for name in _ADDRESSES if ready.get(name)}}


_ADDRESSES = ("address", "http_address", "openai_address", "executor_address")


def _fixed(config: Mapping[str, Any], field: str) -> str | None:
    """A configured address with a port of its own, as this host dials it."""
    listen = parse_listen(str(config.get(field) or "127.0.0.1:0"), field=field)
    if isinstance(listen, UnixAddress):
        return str(listen)
    return reachable(str(listen)) if listen.port else None
