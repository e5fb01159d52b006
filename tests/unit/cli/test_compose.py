"""What `up` writes for its services is what their own configuration models accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from meshkit.cli.compose import MeshPlan, gateway_config, plan_mesh, scheduler_config, worker_config
from meshkit.cli.options import MeshOptions
from meshkit.cli.state import StateDir
from meshkit.config import parse_config
from meshkit.errors import InvalidArgument
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

SCHEDULER = "127.0.0.1:4000"


def plan(tmp_path: Path, **flags: Any) -> MeshPlan:
    """The plan of `up --model-path /models/m` with further flags, for a model of 2048 tokens."""
    options = MeshOptions(model_path="m", cache_dir=tmp_path / "cache", **flags)
    return plan_mesh(options, model="m", model_path=tmp_path / "m", context_tokens=2048)


EVERYTHING: dict[str, Any] = {
    "backend_options": {"step_ms": "5"},
    "device_groups": "cpu:0,hash:1;hash:0",
    "dtype": "float32",
    "load_format": "gguf",
    "chunked_prefill_size": 256,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "page_size": 16,
    "schedule_policy": "lpm",
    "max_total_tokens": 4096,
    "context_length": 1024,
    "served_model_name": "served",
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "enable_mixed_chunk": False,
    "otlp_endpoint": "http://127.0.0.1:4317",
    "strict": True,
    "executor_python": "/usr/bin/python3",
    "log_level": "debug",
}


@pytest.mark.parametrize("flags", [{}, EVERYTHING], ids=["no flags", "every flag"])
def test_all_services_accept_their_configuration(flags: dict[str, Any], tmp_path: Path) -> None:
    mesh, state = plan(tmp_path, **flags), StateDir(tmp_path)
    parse_config(SchedulerConfig, scheduler_config(mesh, state=state), source="scheduler")
    parse_config(
        GatewayConfig, gateway_config(mesh, state=state, scheduler_address=SCHEDULER), source="gateway"
    )
    for worker in mesh.workers:
        config = worker_config(mesh, worker, state=state, scheduler_address=SCHEDULER)
        parse_config(WorkerConfig, config, source="worker")


def test_flags_reach_the_services_that_they_are_for(tmp_path: Path) -> None:
    mesh, state = plan(tmp_path, **EVERYTHING), StateDir(tmp_path)
    scheduler = parse_config(SchedulerConfig, scheduler_config(mesh, state=state), source="scheduler")
    assert [(group.name, group.model) for group in scheduler.groups] == [
        ("group-0", "served"),
        ("group-1", "served"),
    ]
    assert (scheduler.schedule_policy, scheduler.enable_radix_cache, scheduler.enable_overlap) == (
        "lpm",
        False,
        False,
    )
    workers = [
        parse_config(
            WorkerConfig,
            worker_config(mesh, worker, state=state, scheduler_address=SCHEDULER),
            source="worker",
        )
        for worker in mesh.workers
    ]
    placed = [(worker.worker_id, worker.group, worker.backend, worker.device) for worker in workers]
    assert placed == [
        ("worker-0", "group-0", "cpu", 0),
        ("worker-1", "group-0", "hash", 1),
        ("worker-2", "group-1", "hash", 0),
    ]
    assert {worker.executors_on_host for worker in workers} == {3}
    assert {worker.executor.python for worker in workers} == {"/usr/bin/python3"}


def test_without_device_groups_the_backend_gets_its_first_device(tmp_path: Path) -> None:
    (worker,) = plan(tmp_path, backend="hash").workers
    assert (worker.device.backend, worker.device.index, worker.group) == ("hash", 0, "default")


@pytest.mark.parametrize(("context", "expected"), [(None, 2048), (512, 512)])
def test_no_chunking_means_a_chunk_as_long_as_any_prompt(
    context: int | None, expected: int, tmp_path: Path
) -> None:
    assert plan(tmp_path, chunked_prefill_size=-1, context_length=context).chunk_tokens == expected


@pytest.mark.parametrize("size", [0, -2])
def test_a_chunk_size_that_is_no_number_of_tokens_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"--chunked-prefill-size is {size}"):
        plan(tmp_path, chunked_prefill_size=size)
