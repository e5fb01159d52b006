"""Turns the options of `up` into the configuration files of its services.

The services' own models check the values: this file only knows their names, since meshkit imports no service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.address import TcpAddress
from meshkit.cli.device_groups import Device, DeviceGroup, parse_device_groups
from meshkit.cli.options import MeshOptions
from meshkit.cli.state import StateDir
from meshkit.errors import InvalidArgument

ANY_FREE_PORT = "127.0.0.1:0"
NO_CHUNKING = -1
# Seconds that live requests get once the mesh is asked to stop; less than `stopping` waits before it kills.
GATEWAY_DRAIN_S = 10.0
WORKER_DRAIN_S = 5.0
SCHEDULER_DRAIN_S = 3.0


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its id (also its service name), group and chip."""

    worker_id: str
    group: str
    device: Device


@dataclass(frozen=True)
class MeshPlan:
    """What is known before the first process starts.

    model: the served name. model_path: absolute. chunk_tokens: None leaves it to the chip's report.
    """

    options: MeshOptions
    model: str
    model_path: Path
    chunk_tokens: int | None
    groups: tuple[DeviceGroup, ...]

    @property
    def workers(self) -> list[WorkerPlan]:
        """All workers, numbered over all groups in the order of the notation."""
        places = [(group.name, device) for group in self.groups for device in group.devices]
        return [
            WorkerPlan(f"worker-{number}", group, device) for number, (group, device) in enumerate(places)
        ]


def plan_mesh(options: MeshOptions, *, model: str, model_path: Path, context_tokens: int) -> MeshPlan:
    """Reads the device groups; without any it is one group with device 0 of the backend.

    context_tokens: longest sequence of the model.

    Raises:
        InvalidArgument, Unimplemented: as `parse_device_groups`, or a chunk size that is no number of tokens.
    """
    groups = parse_device_groups(options.device_groups or f"{options.backend}:0")
    chunk_tokens = _chunk_tokens(options, context_tokens=options.context_length or context_tokens)
    return MeshPlan(options, options.served_model_name or model, model_path, chunk_tokens, groups)


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
        "chunked_prefill_size": plan.chunk_tokens,
        "max_running_requests": options.max_running_requests,
        "enable_mixed_chunk": options.enable_mixed_chunk,
    }
    return {
        **_service_part(options, name="scheduler", state=state),
        "groups": [{"name": group.name, "model": plan.model} for group in plan.groups],
        "drain_timeout_s": SCHEDULER_DRAIN_S,
        "enable_radix_cache": not options.disable_radix_cache,
        "enable_overlap": not options.disable_overlap_schedule,
        **_without_none(chosen),
    }


def gateway_config(plan: MeshPlan, *, state: StateDir, scheduler_address: str) -> dict[str, Any]:
    """GatewayConfig as JSON."""
    options = plan.options
    model = {"name": plan.model, "path": str(plan.model_path), "load_format": options.load_format}
    return {
        **_service_part(options, name="gateway", state=state),
        "listen": str(TcpAddress(options.host, options.port)),
        "http_listen": str(TcpAddress(options.host, options.http_port)),
        "scheduler_address": scheduler_address,
        "models": [{**model, **_without_none({"context_length": options.context_length})}],
        "cache_dir": str(options.cache_dir),
        "drain_grace_s": GATEWAY_DRAIN_S,
    }


def worker_config(
    plan: MeshPlan, worker: WorkerPlan, *, state: StateDir, scheduler_address: str
) -> dict[str, Any]:
    """WorkerConfig as JSON."""
    options = plan.options
    chosen = {
        "page_size": options.page_size,
        "max_running_requests": options.max_running_requests,
        "mem_fraction_static": options.mem_fraction_static,
        "max_total_tokens": options.max_total_tokens,
        "chunked_prefill_size": plan.chunk_tokens,
        "executor": {"python": options.executor_python} if options.executor_python else None,
    }
    return {
        **_service_part(options, name=worker.worker_id, state=state),
        "worker_id": worker.worker_id,
        "group": worker.group,
        "model": plan.model,
        "scheduler_address": scheduler_address,
        "backend": worker.device.backend,
        "backend_options": options.backend_options,
        "device": worker.device.index,
        "model_path": str(plan.model_path),
        "load_format": options.load_format,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": options.quantization,
        "strict": options.strict,
        "cache_dir": str(options.cache_dir),
        "drain_timeout_s": WORKER_DRAIN_S,
        "executors_on_host": len(plan.workers),
        **_without_none(chosen),
    }


def _service_part(options: MeshOptions, *, name: str, state: StateDir) -> dict[str, Any]:
    """What every service's configuration holds."""
    tracing = {"exporter": "otlp", "endpoint": options.otlp_endpoint} if options.otlp_endpoint else None
    return {
        "listen": ANY_FREE_PORT,
        "http_listen": ANY_FREE_PORT,
        "ready_file": str(state.ready_file(name)),
        "log_level": options.log_level,
        **_without_none({"tracing": tracing}),
    }


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """A field left out takes the service's own default."""
    return {name: value for name, value in values.items() if value is not None}
