"""Turns the options of `up` into the configuration files of its services.

The services' own models check the values: this file only knows their names, since meshkit imports no service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.address import TcpAddress
from meshkit.cli.backend_options import options_for
from meshkit.cli.device_groups import Device, DeviceGroup, parse_device_groups
from meshkit.cli.options import GroupOptions, MeshOptions
from meshkit.cli.state import StateDir
from meshkit.errors import InvalidArgument

ANY_FREE_PORT = "127.0.0.1:0"
NO_CHUNKING = -1
# Seconds that live requests get once the mesh is asked to stop; less than `stopping` waits before it kills.
GATEWAY_DRAIN_S = 10.0
WORKER_DRAIN_S = 5.0
SCHEDULER_DRAIN_S = 3.0
PAGE_TRACES_PER_S = 5.0
"""Traces that begin in a second where nobody asked for any: to look at, at no cost that one could measure."""


@dataclass(frozen=True)
class OpenedModel:
    """A model that is there. path: absolute. context_tokens: its longest sequence."""

    name: str
    path: Path
    context_tokens: int


@dataclass(frozen=True)
class GroupPlan:
    """A group with its own settings. model: the served name. chunk_tokens: None leaves it to the chips'
    reports.
    """

    name: str
    replicas: tuple[tuple[Device, ...], ...]
    weight: float
    settings: MeshOptions
    model: str
    model_path: Path
    chunk_tokens: int | None
    own: Mapping[str, Any]
    """What the scheduler's group has of its own: guard, parity, schedule_policy."""


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its id (also its service name), group and chips, one for each rank."""

    worker_id: str
    group: GroupPlan
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class MeshPlan:
    """What is known before the first process starts."""

    options: MeshOptions
    groups: tuple[GroupPlan, ...]
    traces_listen: str | None = None
    """Where the gateway takes spans for its page; None: it does not."""

    @property
    def tracing(self) -> dict[str, Any] | None:
        """TracingConfig of every service as JSON."""
        if self.options.otlp_endpoint:
            return {"exporter": "otlp", "endpoint": self.options.otlp_endpoint}
        if self.traces_listen is None:
            return None
        endpoint = f"http://{self.traces_listen}"
        return {"exporter": "otlp", "endpoint": endpoint, "max_traces_per_s": PAGE_TRACES_PER_S}

    @property
    def workers(self) -> list[WorkerPlan]:
        """All workers, numbered over all groups in the order of the notation."""
        places = [(group, replica) for group in self.groups for replica in group.replicas]
        return [
            WorkerPlan(f"worker-{number}", group, replica) for number, (group, replica) in enumerate(places)
        ]

    @property
    def model(self) -> str:
        """The served names."""
        return ", ".join(dict.fromkeys(group.model for group in self.groups))


def model_references(options: MeshOptions) -> dict[str, bool]:
    """The models to open, and whether weights are needed of each.

    Raises:
        InvalidArgument: a group has no model, and --model-path gives none.
    """
    settings = [settings for _, settings, _ in _groups(options)]
    if not all(each.model_path for each in settings):
        raise InvalidArgument(
            "--model-path is missing, and not every group of the groups file has a model_path",
            field="--model-path",
        )
    wanted: dict[str, bool] = {}
    for each in settings:
        wanted[each.model_path] = wanted.get(each.model_path, False) or each.load_format != "dummy"
    return wanted


def plan_mesh(options: MeshOptions, models: Mapping[str, OpenedModel]) -> MeshPlan:
    """Reads the groups; without any it is one group with device 0 of the backend. models: by reference.

    Raises:
        InvalidArgument, Unimplemented: as `parse_device_groups`; a chunk size that is no number of tokens;
            two models under one name, or a backend option that is for no backend or could be for several.
    """
    own = {group.name: group for group in options.groups}
    groups = tuple(
        _plan_group(group, settings, weight, models[settings.model_path], own.get(group.name))
        for group, settings, weight in _groups(options)
    )
    _check_models(groups)
    _check_options(groups)
    _check_sizes(groups)
    return MeshPlan(options, groups)


def _groups(options: MeshOptions) -> list[tuple[DeviceGroup, MeshOptions, float]]:
    """(members, settings, weight) of each group."""
    if not options.groups:
        return [
            (group, options, 1.0)
            for group in parse_device_groups(options.device_groups or f"{options.backend}:0")
        ]
    devices = parse_device_groups(";".join(group.devices for group in options.groups))
    if len(devices) != len(options.groups):
        raise InvalidArgument(
            "a group of the groups file names members of several groups; ';' may not stand in devices",
            field="--groups-file",
        )
    return [
        (DeviceGroup(own.name, members.replicas), options.model_copy(update=own.overrides), own.weight)
        for own, members in zip(options.groups, devices, strict=True)
    ]


def _plan_group(
    group: DeviceGroup, settings: MeshOptions, weight: float, model: OpenedModel, own: GroupOptions | None
) -> GroupPlan:
    return GroupPlan(
        name=group.name,
        replicas=group.replicas,
        weight=weight,
        settings=settings,
        model=settings.served_model_name or model.name,
        model_path=model.path,
        chunk_tokens=_chunk_tokens(settings, context_tokens=settings.context_length or model.context_tokens),
        own=_without_none(own.model_dump(include={"guard", "parity", "schedule_policy"})) if own else {},
    )


def _check_models(groups: Sequence[GroupPlan]) -> None:
    paths: dict[str, Path] = {}
    for group in groups:
        if paths.setdefault(group.model, group.model_path) != group.model_path:
            raise InvalidArgument(
                f"group {group.name!r} serves {group.model_path} as {group.model!r}, which is the name of "
                f"{paths[group.model]} already; give it another served_model_name",
                field="--groups-file",
            )


def _check_options(groups: Sequence[GroupPlan]) -> None:
    """An option goes to the one backend of those that share it, or says which one it is for."""
    everywhere = {replica[0].backend for group in groups for replica in group.replicas}
    for group in groups:
        options = group.settings.backend_options
        sharing = {
            replica[0].backend
            for each in groups
            for replica in each.replicas
            if each.settings.backend_options is options
        }
        for key in options:
            scope, dot, _ = key.partition(".")
            if dot and scope not in everywhere:
                raise InvalidArgument(
                    f"--backend-option {key}: no group has backend {scope!r}", field="--backend-option"
                )
            if not dot and len(sharing) > 1:
                raise InvalidArgument(
                    f"--backend-option {key}: it could be for {' or '.join(sorted(sharing))}; say which one, "
                    f"as BACKEND.{key}=VALUE",
                    field="--backend-option",
                )


def _check_sizes(groups: Sequence[GroupPlan]) -> None:
    """Sizes that are given make up each replica's chips."""
    for group in groups:
        tensor, pipeline = group.settings.tensor_parallel_size, group.settings.pipeline_parallel_size
        for replica in group.replicas:
            count, given = len(replica), (tensor or 1) * (pipeline or 1)
            if count % given or (tensor and pipeline and count != given):
                raise InvalidArgument(
                    f"group {group.name!r} has a replica {'+'.join(map(str, replica))} of {count} chips; "
                    f"--tp-size {tensor or 'not given'} times --pp-size {pipeline or 'not given'} has to "
                    "make up as many; groups of different layouts each say theirs in a groups file "
                    "(tensor_parallel_size, pipeline_parallel_size)",
                    field="--tp-size" if tensor else "--pp-size",
                )


def _chunk_tokens(options: MeshOptions, *, context_tokens: int) -> int | None:
    """Without chunking a step takes a whole prompt, however long: the services know that as a size."""
    size = options.chunked_prefill_size
    if size == NO_CHUNKING:
        return context_tokens
    if size is not None and size < 1:
        raise InvalidArgument(
            f"--chunked-prefill-size is {size}; expected at least 1 token, or {NO_CHUNKING} for no chunking",
            field="--chunked-prefill-size",
        )
    return size


def scheduler_config(plan: MeshPlan, *, state: StateDir) -> dict[str, Any]:
    """SchedulerConfig as JSON."""
    options = plan.options
    chosen = {
        "schedule_policy": options.schedule_policy,
        "schedule_conservativeness": options.schedule_conservativeness,
        "radix_eviction_policy": options.radix_eviction_policy,
        "radix_attention_min_len": options.radix_attention_min_len,
        "enable_priority_preemption": options.enable_priority_preemption or None,
        "enable_mixed_chunk": options.enable_mixed_chunk,
        "traffic_file": str(options.traffic_file) if options.traffic_file else None,
    }
    return {
        **_service_part(plan, name="scheduler", state=state),
        "groups": [_scheduler_group(group) for group in plan.groups],
        "drain_grace_s": SCHEDULER_DRAIN_S,
        "enable_radix_cache": not options.disable_radix_cache,
        "enable_overlap": not options.disable_overlap_schedule,
        **_without_none(chosen),
    }


def _scheduler_group(group: GroupPlan) -> dict[str, Any]:
    ceilings = {
        "chunked_prefill_size": group.chunk_tokens,
        "max_running_requests": group.settings.max_running_requests,
        "step_window_s": group.settings.step_window_s,
    }
    named = {"name": group.name, "model": group.model, "weight": group.weight}
    return {**named, **_without_none(ceilings), **group.own}


def gateway_config(plan: MeshPlan, *, state: StateDir, scheduler_address: str) -> dict[str, Any]:
    """GatewayConfig as JSON."""
    options = plan.options
    models = {group.model: group for group in plan.groups}
    return {
        **_service_part(plan, name="gateway", state=state),
        "listen": str(TcpAddress(options.host, options.port)),
        "http_listen": str(TcpAddress(options.host, options.http_port)),
        "openai_listen": str(TcpAddress(options.host, options.openai_port)),
        "scheduler_address": scheduler_address,
        "models": [_gateway_model(name, group) for name, group in models.items()],
        "cache_dir": str(options.cache_dir),
        "drain_grace_s": GATEWAY_DRAIN_S,
        "api_keys_file": str(options.api_keys_file.absolute()) if options.api_keys_file else None,
        "allow_anonymous": options.allow_anonymous,
        "page": _without_none({"traces_listen": plan.traces_listen}),
    }


def _gateway_model(name: str, group: GroupPlan) -> dict[str, Any]:
    settings = group.settings
    model = {"name": name, "path": str(group.model_path), "load_format": settings.load_format}
    return {**model, **_without_none({"context_length": settings.context_length})}


def worker_config(
    plan: MeshPlan, worker: WorkerPlan, *, state: StateDir, scheduler_address: str
) -> dict[str, Any]:
    """WorkerConfig as JSON."""
    group = worker.group
    options = group.settings
    backend = worker.devices[0].backend
    chosen = {
        "page_size": options.page_size,
        "max_running_requests": options.max_running_requests,
        "mem_fraction_static": options.mem_fraction_static,
        "max_total_tokens": options.max_total_tokens,
        "chunked_prefill_size": group.chunk_tokens,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "executor": {"python": options.executor_python} if options.executor_python else None,
    }
    return {
        **_service_part(plan, name=worker.worker_id, state=state),
        "worker_id": worker.worker_id,
        "group": group.name,
        "model": group.model,
        "scheduler_address": scheduler_address,
        "backend": backend,
        "backend_options": options_for(backend, options.backend_options),
        **_devices(worker),
        "model_path": str(group.model_path),
        "load_format": options.load_format,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": options.quantization,
        "strict": options.strict,
        "cache_dir": str(options.cache_dir),
        "drain_timeout_s": WORKER_DRAIN_S,
        "executors_on_host": sum(len(each.devices) for each in plan.workers),
        **_without_none(chosen),
    }


def _devices(worker: WorkerPlan) -> dict[str, Any]:
    """`device` of one chip, `devices` of several."""
    indices = [device.index for device in worker.devices]
    return {"device": indices[0]} if len(indices) == 1 else {"devices": indices}


def _service_part(plan: MeshPlan, *, name: str, state: StateDir) -> dict[str, Any]:
    """What every service's configuration holds."""
    return {
        "listen": ANY_FREE_PORT,
        "http_listen": ANY_FREE_PORT,
        "ready_file": str(state.ready_file(name)),
        "log_level": plan.options.log_level,
        **_without_none({"tracing": plan.tracing}),
    }


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """A field left out takes the service's own default."""
    return {name: value for name, value in values.items() if value is not None}
