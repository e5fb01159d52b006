"""The chart says what images, compose files, dashboards and the services themselves say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.chart import CHART, DEPLOY, VALUES, Manifest, containers, read_values, render

DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def stage(target: str) -> str:
    """Instructions of one stage of the Dockerfile."""
    (found,) = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(found)


def service(pod: Manifest) -> Manifest:
    """The container that runs a service; all other pods have none."""
    (container,) = pod["spec"]["containers"]
    return dict(container)


def services(name: str) -> list[tuple[str, Manifest]]:
    """(component, pod) of all but the Job of models."""
    pods = render(read_values(name)).pods().values()
    labelled = [(pod["metadata"]["labels"]["app.kubernetes.io/component"], pod) for pod in pods]
    return [(component, pod) for component, pod in labelled if component != "models"]


@pytest.mark.parametrize("name", VALUES)
def test_images_are_targets_of_the_dockerfile_and_run_as_it_says(name: str) -> None:
    for component, pod in services(name):
        container = service(pod)
        prefix, image = container["image"].split("/")
        target, tag = image.split(":")
        text = stage(target)
        assert (prefix, tag) == ("chipmesh", "0.1.0")
        (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
        assert json.loads(command) == container["args"]
        exposed = {int(port) for port in re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0].split()}
        assert {port["containerPort"] for port in container["ports"]} == exposed
        assert component in target


def test_user_group_and_folder_of_models_are_the_images() -> None:
    base = stage("base")
    for _, pod in services("default"):
        security = pod["spec"]["securityContext"]
        assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in base
        mounts = {mount["name"]: mount["mountPath"] for mount in service(pod)["volumeMounts"]}
        assert mounts["tmp"] == "/tmp"
        assert f"install -d {mounts['configuration']}" in base
        if "models" in mounts:
            assert f"CHIPMESH_CACHE_DIR={mounts['models']}" in base
            assert f"VOLUME {mounts['models']}" in base


def test_init_containers_need_no_more_than_a_shell_which_every_image_has() -> None:
    for name in VALUES:
        for _, pod in services(name):
            for container in pod["spec"].get("initContainers", []):
                assert container["command"] == ["sh", "-ec"]
                assert container["image"] == service(pod)["image"], "no image beside the service's own"


def test_the_versions_are_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("name", VALUES)
def test_probes_ask_what_there_is_and_kill_nobody_who_loads_or_waits_for_a_scheduler(name: str) -> None:
    for component, pod in services(name):
        container = service(pod)
        (http,) = [port for port in container["ports"] if port["name"] == "http"]
        assert f":{http['containerPort']}/health" in (DEPLOY / "docker" / "healthcheck.py").read_text()
        paths = {
            probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")
        }
        assert all(path["port"] == "http" for path in paths.values())
        assert paths["readiness"]["path"] == "/health"
        # /health says no while a model loads and while there is no scheduler: nothing to be killed for.
        assert paths["liveness"]["path"] == "/live"
        assert paths["startup"]["path"] == ("/health" if component == "worker" else "/live")


def test_a_model_may_load_as_long_as_the_values_say() -> None:
    ((_, pod),) = [item for item in services("tensor-parallel") if item[0] == "worker"]
    probe = service(pod)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600


@pytest.mark.parametrize("name", VALUES)
def test_pods_get_their_drain_time_and_some_to_end(name: str) -> None:
    rendered = render(read_values(name))
    for owner, pod in rendered.pods().items():
        grace = pod["spec"].get("terminationGracePeriodSeconds")
        if "-worker-" in owner:
            config = json.loads(rendered.one("ConfigMap", owner)["data"]["10-worker.json"])
            assert grace == config["drain_timeout_s"] + 10
        elif owner.endswith("-gateway"):
            config = json.loads(rendered.one("ConfigMap", owner)["data"]["10-gateway.json"])
            pause = int(service(pod)["lifecycle"]["preStop"]["exec"]["command"][1])
            assert grace == pause + config["drain_grace_s"] + 10
        elif owner.endswith("-scheduler"):
            config = json.loads(rendered.one("ConfigMap", owner)["data"]["10-scheduler.json"])
            assert grace == config["drain_grace_s"] + 10


def test_drain_times_of_workers_are_those_of_compose() -> None:
    ((_, pod),) = [item for item in services("default") if item[0] == "worker"]
    grace = COMPOSE["services"]["worker-a"]["stop_grace_period"]
    assert f"{pod['spec']['terminationGracePeriodSeconds']}s" == grace


def test_tmp_is_as_large_as_composes() -> None:
    (tmpfs,) = COMPOSE["x-hardened"]["tmpfs"]
    for _, pod in services("default"):
        (tmp,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tmp"]
        assert tmp["emptyDir"]["sizeLimit"] == "64Mi"
        assert "size=64m" in tmpfs


def test_a_kunlun_worker_has_the_environment_and_the_runtime_of_its_compose_overlay() -> None:
    overlay = yaml.safe_load((DEPLOY / "compose.kunlun.yaml").read_text(encoding="utf-8"))
    described = overlay["services"]["worker-b"]
    ((_, pod),) = [item for item in services("kunlun") if item[0] == "worker"]
    container = service(pod)
    environment = {item["name"]: item["value"] for item in container["env"]}
    # Which chips a pod sees is said by the device plugin here.
    ours = {name: value for name, value in described["environment"].items() if "VISIBLE" not in name}
    assert environment == ours
    runtime = [volume for volume in described["volumes"] if "/usr/local/xre" in volume]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "xre"]
    assert len(runtime) == len(mounted) == 1
    assert runtime[0].endswith(f":{mounted[0]}:ro")
    assert container["resources"]["limits"]["kunlunxin.com/xpu"] == 1
    (memory,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shared-memory"]
    assert memory["emptyDir"]["sizeLimit"] == "16Gi"
    assert described["shm_size"] == "16gb"


def test_a_cuda_worker_asks_for_a_gpu() -> None:
    ((_, pod),) = [item for item in services("cuda") if item[0] == "worker"]
    assert service(pod)["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_executors_take_ports_of_the_range_that_the_policy_opens() -> None:
    rendered = render({"networkPolicy": {"executorPorts": {"from": 40000, "to": 40999}}})
    pod = rendered.pods()["chipmesh-worker-cpu"]
    (sysctl,) = pod["spec"]["securityContext"]["sysctls"]
    assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": "40000 40999"}
    (rule,) = rendered.one("NetworkPolicy", "chipmesh-worker")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 40000, "endPort": 40999}]


def test_the_dashboard_is_the_one_of_compose() -> None:
    ours = DEPLOY / "observability" / "mesh.json"
    (dashboard,) = [
        item for item in render(read_values("observability")).of_kind("ConfigMap")
        if item["metadata"]["name"].endswith("-dashboard")
    ]  # fmt: skip
    assert dashboard["data"]["chipmesh.json"] == ours.read_text(encoding="utf-8")


def test_the_alert_rules_are_those_of_compose() -> None:
    ours = yaml.safe_load((DEPLOY / "observability" / "alerts.yaml").read_text(encoding="utf-8"))
    (rules,) = render(read_values("observability")).of_kind("PrometheusRule")
    assert rules["spec"] == ours


def test_the_queue_that_scales_workers_is_a_metric_of_the_scheduler() -> None:
    (scaled,) = render(read_values("observability")).of_kind("ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    (name,) = re.findall(r"chipmesh_([a-z_]+)\{", query)
    known = (DEPLOY.parent / "docs" / "observability.md").read_text(encoding="utf-8")
    assert f"| `{name}` | gauge | scheduler |" in known


def test_models_are_pulled_before_the_services_start_and_where_they_wait_for_them() -> None:
    rendered = render({})
    ((name, job),) = [(name, pod) for name, pod in rendered.pods().items() if "-models-" in name]
    assert [item["args"] for item in job["spec"]["containers"]] == [["pull", "smollm2-135m"]]
    (compose,) = [COMPOSE["services"]["model"]["command"]]
    assert "pull smollm2-135m" in compose
    for component, pod in services("default"):
        waits = [item for item in containers(pod) if item["name"] == "models"]
        assert bool(waits) == (component != "scheduler")
    again = [pod for pod in render({"images": {"tag": "2"}}).pods() if "-models-" in pod]
    assert again != [name], "a Job cannot be changed, so another image is another Job"
