"""What `up` writes for its services is what their own configuration models accept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from meshkit.cli.compose import (
    PAGE_TRACES_PER_S,
    MeshPlan,
    OpenedModel,
    gateway_config,
    model_references,
    plan_mesh,
    scheduler_config,
    worker_config,
)
from meshkit.cli.device_groups import Device
from meshkit.cli.options import GroupOptions, MeshOptions
from meshkit.cli.state import StateDir
from meshkit.cli.up import read_groups
from meshkit.config import TracingConfig, parse_config
from meshkit.errors import InvalidArgument
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

SCHEDULER = "127.0.0.1:4000"


def plan(tmp_path: Path, **flags: Any) -> MeshPlan:
    """The plan of `up --model-path /models/m` with further flags, for a model of 2048 tokens."""
    options = MeshOptions(**{"model_path": "m", "cache_dir": tmp_path / "cache", **flags})
    models = {name: OpenedModel(name, tmp_path / name, 2048) for name in model_references(options)}
    return plan_mesh(options, models)


EVERYTHING: dict[str, Any] = {
    "backend_options": {"hash.step_ms": "5"},
    "device_groups": "cpu:0,hash:1;hash:0",
    "dtype": "float32",
    "load_format": "gguf",
    "chunked_prefill_size": 256,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "page_size": 16,
    "schedule_policy": "lpm",
    "step_window_s": 0.05,
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
    assert {group.step_window_s for group in scheduler.groups} == {0.05}
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
    assert [worker.backend_options for worker in workers] == [{}, {"step_ms": "5"}, {"step_ms": "5"}]
    assert {worker.executors_on_host for worker in workers} == {3}
    assert {worker.executor.python for worker in workers} == {"/usr/bin/python3"}


def test_without_device_groups_the_backend_gets_its_first_device(tmp_path: Path) -> None:
    (worker,) = plan(tmp_path, backend="hash").workers
    assert (worker.devices, worker.group.name) == ((Device("hash", 0),), "default")


def configs(tmp_path: Path, **flags: Any) -> list[WorkerConfig]:
    """The workers' configurations, as they read them."""
    mesh, state = plan(tmp_path, **flags), StateDir(tmp_path)
    return [
        parse_config(
            WorkerConfig,
            worker_config(mesh, worker, state=state, scheduler_address=SCHEDULER),
            source="worker",
        )
        for worker in mesh.workers
    ]


def test_a_replica_of_several_chips_is_one_worker_with_a_rank_on_each(tmp_path: Path) -> None:
    workers = configs(tmp_path, device_groups="cpu:0+cpu:1,cpu:2+cpu:3;cpu:7")
    assert [(worker.worker_id, worker.group, worker.own_devices) for worker in workers] == [
        ("worker-0", "group-0", (0, 1)),
        ("worker-1", "group-0", (2, 3)),
        ("worker-2", "group-1", (7,)),
    ]
    assert [worker.is_set for worker in workers] == [True, True, False]
    # Each takes its share of processors and memory by executors, not by workers.
    assert {worker.executors_on_host for worker in workers} == {5}


def test_sizes_reach_the_workers_and_a_groups_file_has_them_by_group(tmp_path: Path) -> None:
    (worker,) = configs(tmp_path, device_groups="cpu:0+cpu:1+cpu:2+cpu:3", tensor_parallel_size=2)
    assert (worker.tensor_parallel_size, worker.pipeline_parallel_size) == (2, None)
    groups = (
        GroupOptions(name="rows", devices="cpu:0+cpu:1", tensor_parallel_size=2),
        GroupOptions(name="stages", devices="cpu:2+cpu:3", pipeline_parallel_size=2),
    )
    rows, stages = configs(tmp_path, groups=groups)
    assert (rows.tensor_parallel_size, rows.pipeline_parallel_size) == (2, None)
    assert (stages.tensor_parallel_size, stages.pipeline_parallel_size) == (None, 2)


@pytest.mark.parametrize(
    ("devices", "sizes", "field"),
    [
        ("cpu:0+cpu:1", {"tensor_parallel_size": 3}, "--tp-size"),
        ("cpu:0+cpu:1", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "--tp-size"),
        ("cpu:0+cpu:1;cpu:2", {"pipeline_parallel_size": 2}, "--pp-size"),
        ("cpu:0", {"tensor_parallel_size": 2}, "--tp-size"),
    ],
)
def test_sizes_that_do_not_make_up_a_replicas_chips_are_refused_with_both_numbers(
    devices: str, sizes: dict[str, int], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="chips; --tp-size") as caught:
        plan(tmp_path, device_groups=devices, **sizes)
    assert caught.value.field == field


@pytest.mark.parametrize(("context", "expected"), [(None, 2048), (512, 512)])
def test_no_chunking_means_a_chunk_as_long_as_any_prompt(
    context: int | None, expected: int, tmp_path: Path
) -> None:
    assert plan(tmp_path, chunked_prefill_size=-1, context_length=context).groups[0].chunk_tokens == expected


@pytest.mark.parametrize("size", [0, -2])
def test_a_chunk_size_that_is_no_number_of_tokens_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"--chunked-prefill-size is {size}"):
        plan(tmp_path, chunked_prefill_size=size)


GROUPS = """{"groups": [
    {"name": "fast", "devices": "cpu:0", "weight": 80, "dtype": "float32", "max_running_requests": 4},
    {"name": "spare", "devices": "hash:0,hash:1", "weight": 20, "guard": {"max_error_share": 0.1}},
    {"name": "other", "devices": "cpu:1", "model_path": "n", "chunked_prefill_size": 64, "page_size": 32}
]}"""


def write_groups(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "groups.json"
    file.write_text(text)
    return file


def test_a_groups_file_gives_groups_their_own_models_weights_and_settings(tmp_path: Path) -> None:
    groups = read_groups(write_groups(tmp_path, GROUPS))
    mesh, state = plan(tmp_path, groups=groups, dtype="bfloat16"), StateDir(tmp_path)
    scheduler = parse_config(SchedulerConfig, scheduler_config(mesh, state=state), source="scheduler")
    assert [(each.name, each.model, each.weight) for each in scheduler.groups] == [
        ("fast", "m", 80), ("spare", "m", 20), ("other", "n", 1),
    ]  # fmt: skip
    assert [each.max_running_requests for each in scheduler.groups] == [4, None, None]
    assert [each.guard is not None for each in scheduler.groups] == [False, True, False]
    assert [each.chunked_prefill_size for each in scheduler.groups] == [None, None, 64]
    gateway = parse_config(
        GatewayConfig, gateway_config(mesh, state=state, scheduler_address=SCHEDULER), source="gateway"
    )
    assert [model.name for model in gateway.models] == ["m", "n"]
    workers = [worker_config(mesh, each, state=state, scheduler_address=SCHEDULER) for each in mesh.workers]
    assert [(each["group"], each["model"], each["dtype"]) for each in workers] == [
        ("fast", "m", "float32"), ("spare", "m", "bfloat16"), ("spare", "m", "bfloat16"),
        ("other", "n", "bfloat16"),
    ]  # fmt: skip
    assert workers[3]["page_size"] == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"groups": [', "groups.json"),
        ('{"groups": []}', "groups"),
        ('{"groups": [{"name": "a", "devices": "cpu:0", "wieght": 2}]}', "wieght"),
        ('{"groups": [{"name": "a", "devices": "cpu:0", "weight": -2}]}', "weight"),
        ('{"groups": [{"name": "a", "devices": "cpu:0"}, {"name": "a", "devices": "cpu:1"}]}', "twice: a"),
    ],
)
def test_a_wrong_groups_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        read_groups(write_groups(tmp_path, text))
    assert caught.value.field == "--groups-file"


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([("a", "cpu:0"), ("b", "cpu:0")], "cpu:0 occurs twice"),
        ([("a", "cpu:0;cpu:1")], "several groups"),
    ],
)
def test_groups_that_share_a_device_or_hold_two_groups_are_refused(
    tmp_path: Path, groups: list[tuple[str, str]], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        plan(tmp_path, groups=tuple(GroupOptions(name=name, devices=devices) for name, devices in groups))


def test_two_models_under_one_name_are_refused(tmp_path: Path) -> None:
    groups = (
        GroupOptions(name="a", devices="cpu:0", served_model_name="x"),
        GroupOptions(name="b", devices="cpu:1", model_path="n", served_model_name="x"),
    )
    with pytest.raises(InvalidArgument, match="served_model_name"):
        plan(tmp_path, groups=groups)


def test_a_group_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--model-path is missing"):
        plan(tmp_path, model_path="", groups=(GroupOptions(name="a", devices="cpu:0"),))


@pytest.mark.parametrize(("option", "said"), [("step_ms", "BACKEND.step_ms"), ("xpu.a", "no group has")])
def test_an_option_says_which_of_several_backends_it_is_for(tmp_path: Path, option: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        plan(tmp_path, device_groups="cpu:0;hash:0", backend_options={option: "5"})


def test_spans_go_to_the_page_unless_somebody_named_a_collector(
    tmp_path: Path,
) -> None:
    def configured(mesh: MeshPlan) -> tuple[GatewayConfig, list[TracingConfig]]:
        state = StateDir(tmp_path)
        raw = gateway_config(mesh, state=state, scheduler_address=SCHEDULER)
        gateway = parse_config(GatewayConfig, raw, source="gateway")
        scheduler = parse_config(SchedulerConfig, scheduler_config(mesh, state=state), source="scheduler")
        (worker,) = mesh.workers
        raw = worker_config(mesh, worker, state=state, scheduler_address=SCHEDULER)
        tracing = parse_config(WorkerConfig, raw, source="worker").tracing
        return gateway, [gateway.tracing, scheduler.tracing, tracing]

    plain = plan(tmp_path)
    gateway, all_tracing = configured(plain)
    assert gateway.page.traces_listen is None
    assert {tracing.exporter for tracing in all_tracing} == {"none"}
    gateway, all_tracing = configured(replace(plain, traces_listen="127.0.0.1:4000"))
    assert gateway.page.traces_listen == "127.0.0.1:4000"
    assert {tracing.endpoint for tracing in all_tracing} == {"http://127.0.0.1:4000"}
    assert {tracing.max_traces_per_s for tracing in all_tracing} == {PAGE_TRACES_PER_S}
    gateway, all_tracing = configured(plan(tmp_path, otlp_endpoint="http://collector:4317"))
    assert gateway.page.traces_listen is None
    assert {tracing.endpoint for tracing in all_tracing} == {"http://collector:4317"}
