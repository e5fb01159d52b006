"""The services' own models take every configuration that the chart writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from gateway.config import GatewayConfig
from gateway.key_files import ApiKeyList
from meshkit.config import load_config, parse_config
from meshkit.rpc.exposure import check_exposure
from meshkit.telemetry.metrics import Metrics
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.traffic_file import read_weights
from tests.deploy.chart import (
    DEPLOY,
    VALUES,
    Manifest,
    Rendered,
    Values,
    read_values,
    render,
    written_configuration,
)
from worker_svc.config import WorkerConfig


def workers(rendered: Rendered) -> dict[str, Manifest]:
    return {name: pod for name, pod in rendered.pods().items() if "-worker-" in name}


def gateway_config(rendered: Rendered, folder: Path) -> GatewayConfig:
    pod = rendered.pods()["chipmesh-gateway"]
    return load_config(GatewayConfig, written_configuration(rendered, pod, folder, pod_name="gateway-x"))


def scheduler_config(rendered: Rendered, folder: Path) -> SchedulerConfig:
    pod = rendered.pods()["chipmesh-scheduler"]
    return load_config(SchedulerConfig, written_configuration(rendered, pod, folder, pod_name="s-0"))


def worker_config(rendered: Rendered, name: str, folder: Path, *, index: int = 0) -> WorkerConfig:
    """index: of the pod in its replica, where that has several."""
    folder.mkdir(exist_ok=True)
    pod = f"{name}-0" if index == 0 else f"{name}-0-{index}"
    controller = {"LWS_LEADER_ADDRESS": f"{name}-0.{name}.mesh", "LWS_WORKER_INDEX": str(index)}
    written = written_configuration(
        rendered, workers(rendered)[name], folder, pod_name=pod, environment=controller
    )
    return load_config(WorkerConfig, written)


@pytest.mark.parametrize("name", VALUES)
def test_the_gateway_takes_its_configuration(name: str, tmp_path: Path) -> None:
    rendered = render(read_values(name))
    config = gateway_config(rendered, tmp_path)
    assert (config.listen, config.http_listen) == ("0.0.0.0:50051", "0.0.0.0:8080")
    assert config.openai_listen == "0.0.0.0:8000"
    assert config.api_keys_file is not None
    check_exposure(config, {"scheduler_address": config.scheduler_address}, metrics=Metrics())
    service = rendered.one("Service", "chipmesh-scheduler")
    assert config.scheduler_address == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


@pytest.mark.parametrize("name", VALUES)
def test_the_scheduler_takes_its_configuration_and_knows_every_group(name: str, tmp_path: Path) -> None:
    values = read_values("default") | read_values(name)
    config = scheduler_config(render(values), tmp_path)
    assert [(item.name, item.model) for item in config.groups] == [
        (item["name"], item["model"]) for item in values["groups"]
    ]
    check_exposure(config, {"listen": config.listen}, metrics=Metrics())
    assert config.strict_groups, "a worker of a group that the chart does not know is none of ours"


@pytest.mark.parametrize("name", VALUES)
def test_the_traffic_file_is_one_and_names_the_groups_of_each_model(name: str) -> None:
    rendered = render(read_values(name))
    weights = read_weights(rendered.one("ConfigMap", "chipmesh-traffic")["data"]["traffic.json"])
    scheduler = json.loads(rendered.one("ConfigMap", "chipmesh-scheduler")["data"]["10-scheduler.json"])
    named = {(model, group) for model, groups in weights.items() for group in groups}
    assert named == {(item["model"], item["name"]) for item in scheduler["groups"]}


@pytest.mark.parametrize("name", VALUES)
def test_workers_take_their_configuration_and_are_who_their_pod_is(name: str, tmp_path: Path) -> None:
    rendered = render(read_values(name))
    served = {model.name: model.path for model in gateway_config(rendered, tmp_path).models}
    for worker in workers(rendered):
        config = worker_config(rendered, worker, tmp_path / worker)
        assert config.worker_id == f"{worker}-0"
        assert (config.executor.listen, config.executor.advertise) == ("0.0.0.0:0", "10.1.2.3")
        assert config.scheduler_address == "chipmesh-scheduler:50061"
        check_exposure(config, {"executor.listen": config.executor.listen}, metrics=Metrics())
        assert config.model_path == served[config.model]


def test_the_pods_of_a_set_are_ranks_of_one_worker_and_meet_at_the_first(tmp_path: Path) -> None:
    rendered = render(read_values("tensor-parallel"))
    (name,) = workers(rendered)
    first, second = (worker_config(rendered, name, tmp_path / str(pod), index=pod) for pod in range(2))
    assert first.worker_id == second.worker_id == f"{name}-0"
    assert first.rendezvous == second.rendezvous == f"{name}-0.{name}.mesh:29600"
    assert (first.first_rank, second.first_rank) == (0, 2)
    assert (first.own_devices, second.own_devices) == ((0, 1), (0, 1))
    assert (second.tensor_parallel_size, second.pipeline_parallel_size) == (2, 2)
    assert first.tls is not None
    assert second.tls == first.tls


@pytest.mark.parametrize("name", VALUES)
def test_the_keys_file_is_one_and_its_keys_are_mounted(name: str) -> None:
    rendered = render(read_values(name))
    (pod,) = [pod for name, pod in rendered.pods().items() if name == "chipmesh-gateway"]
    (gateway,) = pod["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway["volumeMounts"]}
    config = json.loads(rendered.one("ConfigMap", "chipmesh-gateway")["data"]["50-clients.json"])
    assert config["api_keys_file"] == f"{mounts['clients']}/keys.json"
    content = json.loads(rendered.one("ConfigMap", "chipmesh-clients")["data"]["keys.json"])
    keys = parse_config(ApiKeyList, content, source="keys.json").root
    assert keys
    assert [str(key.file) for key in keys] == [f"{mounts['keys']}/{key.name}" for key in keys]


def test_a_key_by_its_hash_and_its_budgets_reach_the_gateway() -> None:
    entry = {"name": "team", "sha256": "ab" * 32, "tokens_per_minute": 1000, "share_cache": True}
    rendered = render({"gateway": {"keys": {"entries": [entry]}}})
    content = json.loads(rendered.one("ConfigMap", "chipmesh-clients")["data"]["keys.json"])
    (key,) = parse_config(ApiKeyList, content, source="keys.json").root
    assert (key.name, key.file, key.tokens_per_minute, key.share_cache) == ("team", None, 1000, True)


def test_a_gateway_for_everyone_says_so_and_asks_for_no_keys(tmp_path: Path) -> None:
    rendered = render({"gateway": {"allowAnonymous": True}})
    config = gateway_config(rendered, tmp_path)
    assert config.allow_anonymous
    assert (config.api_keys, config.api_keys_file) == ([], None)
    assert "WARNING: gateway.allowAnonymous" in rendered.notes


def test_a_certificate_of_the_public_listener_is_mounted_where_the_gateway_looks(tmp_path: Path) -> None:
    rendered = render({"gateway": {"tlsSecret": "public"}})
    config = gateway_config(rendered, tmp_path)
    (gateway,) = rendered.pods()["chipmesh-gateway"]["spec"]["containers"]
    (mount,) = [mount for mount in gateway["volumeMounts"] if mount["name"] == "listen-tls"]
    assert config.listen_tls is not None
    assert str(config.listen_tls.certificate) == f"{mount['mountPath']}/tls.crt"
    assert str(config.listen_tls.key) == f"{mount['mountPath']}/tls.key"


def test_further_fields_reach_the_services(tmp_path: Path) -> None:
    values: Values = {
        "gateway": {"config": {"resume_window_s": 5}},
        "scheduler": {"config": {"schedule_policy": "fcfs", "max_queued_requests": 7}},
        "groups": [{
            "name": "a", "model": "smollm2-135m", "backend": "cpu", "threads": 3,
            "scheduling": {"max_running_requests": 4},
            "config": {"dtype": "bfloat16", "executor": {"start_timeout_s": 600}},
        }],
        "tracing": {"endpoint": "http://collector:4317", "samplingRatio": 0.5, "maxTracesPerSecond": 3},
    }  # fmt: skip
    rendered = render(values)
    folders = [tmp_path / name for name in "gsw"]
    for folder in folders:
        folder.mkdir()
    gateway, scheduler = gateway_config(rendered, folders[0]), scheduler_config(rendered, folders[1])
    worker = worker_config(rendered, "chipmesh-worker-a", folders[2])
    assert gateway.resume_window_s == 5
    assert (scheduler.schedule_policy, scheduler.max_queued_requests) == ("fcfs", 7)
    assert scheduler.groups[0].max_running_requests == 4
    assert (worker.dtype, worker.executor.start_timeout_s, worker.executor.threads) == ("bfloat16", 600, 3)
    assert worker.executor.listen == "0.0.0.0:0"
    for config in (gateway, scheduler, worker):
        assert config.tracing.endpoint == "http://collector:4317"
        assert (config.tracing.sampling_ratio, config.tracing.max_traces_per_s) == (0.5, 3)


@pytest.mark.parametrize("name", ["kunlun", "kunlun-emulated", "cuda"])
def test_a_chip_is_configured_as_its_compose_overlay_does(name: str, tmp_path: Path) -> None:
    rendered = render(read_values(name))
    backend = "kunlun" if "kunlun" in name else name
    config = worker_config(rendered, f"chipmesh-worker-{backend}", tmp_path)
    chip = json.loads((DEPLOY / "config" / "compose" / f"chip-{name}.json").read_text(encoding="utf-8"))
    assert {"backend": config.backend, "backend_options": config.backend_options} == {
        "backend_options": {},
        **chip,
    }


def test_the_default_worker_is_as_large_as_composes(tmp_path: Path) -> None:
    config = worker_config(render({}), "chipmesh-worker-cpu", tmp_path)
    ours = json.loads((DEPLOY / "config" / "compose" / "worker-a.json").read_text(encoding="utf-8"))
    assert (config.dtype, config.max_total_tokens) == (ours["dtype"], ours["max_total_tokens"])
    assert config.drain_timeout_s == ours["drain_timeout_s"]


def test_the_shipped_files_of_values_have_no_field_twice() -> None:
    class Strict(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that is given twice, which YAML's own loader takes."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{node.start_mark}: a key is given twice"
            content: dict[object, object] = super().construct_mapping(node, deep)
            return content

    for path in VALUES.values():
        yaml.load(path.read_text(encoding="utf-8"), Loader=Strict)
