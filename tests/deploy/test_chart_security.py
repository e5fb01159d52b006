"""What the chart's containers may do, and who its services are to each other."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from meshkit.config import ServiceConfig, load_config
from scheduler_svc.config import SchedulerConfig
from tests.deploy.chart import (
    VALUES,
    Manifest,
    Rendered,
    containers,
    read_values,
    render,
    written_configuration,
)
from worker_svc.config import WorkerConfig

CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}


@pytest.mark.parametrize("name", VALUES)
def test_every_container_is_confined(name: str) -> None:
    for pod in render(read_values(name)).pods().values():
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (True, 10001, 10001)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in containers(pod):
            assert container["securityContext"] == {
                "runAsNonRoot": True,
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert container["resources"]["limits"]["memory"], "memory has a limit"


@pytest.mark.parametrize("name", VALUES)
def test_containers_write_to_memory_and_to_the_models_and_nowhere_else(name: str) -> None:
    for pod in render(read_values(name)).pods().values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in containers(pod):
            writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            for volume in writable - {"models"}:
                assert volumes[volume]["emptyDir"]["medium"] == "Memory"
                assert volumes[volume]["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("name", VALUES)
def test_folders_of_the_node_are_mounted_where_a_vendors_runtime_needs_it_only(name: str) -> None:
    folders = {
        volume["hostPath"]["path"]
        for pod in render(read_values(name)).pods().values()
        for volume in pod["spec"]["volumes"]
        if "hostPath" in volume
    }
    assert folders == ({"/usr/local/xre"} if name in ("kunlun", "mixed") else set())


def mounted_files(pod: Manifest) -> dict[str, str]:
    """Files of the volume `tls` as the service sees them, and the Secret that each is from."""
    (service,) = pod["spec"]["containers"]
    (mount,) = [item for item in service["volumeMounts"] if item["name"] == "tls"]
    assert mount["readOnly"]
    (volume,) = [item for item in pod["spec"]["volumes"] if item["name"] == "tls"]
    assert volume["projected"]["defaultMode"] == 0o440, "not for everyone"
    return {
        f"{mount['mountPath']}/{item['path']}": source["secret"]["name"]
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }


def pod_names(rendered: Rendered, owner: str, component: str) -> list[str]:
    """Names that Kubernetes would give the pods of a workload; a Deployment's have none that is known."""
    if component == "gateway":
        return [f"{owner}-x"]
    for item in rendered.of_kind("LeaderWorkerSet"):
        if item["metadata"]["name"] == owner:
            size = item["spec"]["leaderWorkerTemplate"]["size"]
            sets = range(item["spec"]["replicas"])
            return [f"{owner}-{index}{f'-{rank}' if rank else ''}" for index in sets for rank in range(size)]
    (item,) = [item for item in rendered.of_kind("StatefulSet") if item["metadata"]["name"] == owner]
    scaled = [
        other["spec"]["maxReplicaCount"]
        for other in rendered.of_kind("ScaledObject")
        if other["metadata"]["name"] == owner
    ]
    return [f"{owner}-{index}" for index in range(scaled[0] if scaled else item["spec"]["replicas"])]


@pytest.mark.parametrize("mode", ["secrets", "certManager"])
@pytest.mark.parametrize("name", VALUES)
def test_each_service_finds_the_certificate_of_its_role_and_name(
    name: str, mode: str, tmp_path: Path
) -> None:
    values: dict[str, Any] = {**read_values(name), "tls": {"mode": mode}}
    rendered = render(values)
    folders = itertools.count()
    for owner, pod in rendered.pods().items():
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "models":
            continue
        for pod_name in pod_names(rendered, owner, component):
            folder = tmp_path / str(next(folders))
            folder.mkdir()
            replica, _, rank = pod_name.removeprefix(f"{owner}-").partition("-")
            # Ranks of a set are one worker, with one certificate.
            first = f"{owner}-{replica}"
            of_a_set = {"LWS_LEADER_ADDRESS": f"{first}.{owner}.mesh", "LWS_WORKER_INDEX": rank or "0"}
            written = written_configuration(rendered, pod, folder, pod_name=pod_name, environment=of_a_set)
            config = load_config(CONFIGS[component], written)
            assert not config.insecure_network
            assert config.tls is not None
            files = mounted_files(pod)
            own = first if component == "worker" else component
            named = (config.tls.certificate, config.tls.key, config.tls.authority)
            assert {files[str(path)] for path in named} == {f"chipmesh-tls-{component}-{own}"}


def test_a_worker_waits_for_its_own_certificate_and_for_no_other(tmp_path: Path) -> None:
    pod = render({}).pods()["chipmesh-worker-cpu"]
    (volume,) = [item for item in pod["spec"]["volumes"] if item["name"] == "tls"]
    assert all(source["secret"]["optional"] for source in volume["projected"]["sources"])
    (wait,) = [item for item in containers(pod) if item["name"] == "certificate"]
    script = wait["args"][0].replace("/etc/chipmesh-tls", str(tmp_path))
    own = tmp_path / "chipmesh-worker-cpu-0"
    environment = {"PATH": os.environ["PATH"], "POD_NAME": own.name}
    waiting = subprocess.Popen([*wait["command"], script], env=environment, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    with waiting.stdout:
        first = waiting.stdout.readline()
        assert first == "waiting for Secret chipmesh-tls-worker-chipmesh-worker-cpu-0\n"
        own.mkdir()
        (own / "certificate.pem").write_text("a certificate", encoding="utf-8")
        assert waiting.wait(timeout=10) == 0


def test_cert_manager_makes_a_certificate_for_each_role_and_worker_by_role_not_by_host() -> None:
    rendered = render({"tls": {"mode": "certManager"}})
    made = {
        item["spec"]["secretName"]: (item["spec"]["uris"], item["spec"]["dnsNames"], item["spec"]["usages"])
        for item in rendered.of_kind("Certificate")
        if not item["spec"].get("isCA")
    }
    usages = ["digital signature", "client auth", "server auth"]
    assert made == {
        f"chipmesh-tls-{role}-{name}": (
            [f"chipmesh://{role}/{name}"],
            [f"{role}.chipmesh.internal", f"{name}.{role}.chipmesh.internal"],
            usages,
        )
        for role, name in [
            ("gateway", "gateway"), ("scheduler", "scheduler"), ("operator", "admin"),
            ("worker", "chipmesh-worker-cpu-0"), ("worker", "chipmesh-worker-cpu-1"),
        ]
    }  # fmt: skip


def test_an_issuer_that_is_there_signs_and_the_chart_makes_no_authority() -> None:
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    rendered = render({"tls": {"mode": "certManager", "certManager": {"issuer": issuer}}})
    assert rendered.of_kind("Issuer") == []
    signers = [item["spec"]["issuerRef"] for item in rendered.of_kind("Certificate")]
    assert signers == [{**issuer, "group": "cert-manager.io"}] * 5


def test_the_key_of_the_authority_is_mounted_nowhere() -> None:
    rendered = render({"tls": {"mode": "certManager"}})
    (authority,) = [item for item in rendered.of_kind("Certificate") if item["spec"].get("isCA")]
    mounted = {secret for pod in rendered.pods().values()
               if any(volume["name"] == "tls" for volume in pod["spec"]["volumes"])
               for secret in mounted_files(pod).values()}  # fmt: skip
    assert authority["spec"]["secretName"] not in mounted


def test_plain_text_is_said_to_every_service_and_in_the_notes(tmp_path: Path) -> None:
    rendered = render({"tls": {"mode": "none"}})
    for component, owner in [
        ("gateway", "chipmesh-gateway"),
        ("scheduler", "chipmesh-scheduler"),
        ("worker", "chipmesh-worker-cpu"),
    ]:
        folder = tmp_path / component
        folder.mkdir()
        pod = rendered.pods()[owner]
        assert all(volume["name"] != "tls" for volume in pod["spec"]["volumes"])
        config = load_config(CONFIGS[component], written_configuration(rendered, pod, folder, pod_name="w-0"))
        assert (config.tls, config.insecure_network) == (None, True)
    assert "WARNING: tls.mode is none" in rendered.notes
    assert "WARNING" not in render({}).notes
