"""The shipped compose files and configurations fit each other, and publish the gateway alone, on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from gateway.config import GatewayConfig
from meshkit.certificates.folder import folder_name
from meshkit.config import FrozenConfig, ServiceConfig, TlsConfig, load_config
from meshkit.rpc.policy import Peer, Role
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MODELS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker-a": WorkerConfig,
    "worker-b": WorkerConfig,
}
ROLES = {
    "gateway": Peer(Role.GATEWAY, "gateway"),
    "scheduler": Peer(Role.SCHEDULER, "scheduler"),
    "worker-a": Peer(Role.WORKER, "worker-a"),
    "worker-b": Peer(Role.WORKER, "worker-b"),
    "operator": Peer(Role.OPERATOR, "admin"),
}
ONE_SHOT = {"model", "certificates"}
OVERLAYS = sorted(path.name for path in DEPLOY.glob("compose.*.yaml"))
CONFIG = "${CHIPMESH_CONFIG:-./config/compose}/"


class ServiceTls(FrozenConfig):
    """What tls.json holds."""

    tls: TlsConfig


def read(name: str) -> dict[str, Any]:
    document = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def configurations(*files: str) -> dict[str, dict[str, Path]]:
    """By service: what lies in its /etc/chipmesh, from which of our files, under these compose files."""
    mounted: dict[str, dict[str, Path]] = {}
    for file in files:
        for service, described in read(file)["services"].items():
            for volume in described.get("volumes", []):
                if volume.startswith(CONFIG):
                    source, target, mode = volume.removeprefix(CONFIG).split(":")
                    assert mode == "ro"
                    mounted.setdefault(service, {})[Path(target).name] = (
                        DEPLOY / "config" / "compose" / source
                    )
    return mounted


@pytest.mark.parametrize("overlays", [(), *((name,) for name in OVERLAYS), tuple(OVERLAYS)])
def test_what_a_service_finds_in_its_folder_is_a_valid_configuration(
    tmp_path: Path, overlays: tuple[str, ...]
) -> None:
    mounted = configurations("compose.yaml", *overlays)
    assert mounted.keys() == MODELS.keys()
    for service, files in mounted.items():
        folder = tmp_path / service
        folder.mkdir()
        for name, source in files.items():
            (folder / name).write_text(source.read_text(encoding="utf-8"))
        config = load_config(MODELS[service], folder)
        assert config.http_listen == "0.0.0.0:8080", "the image's health check asks there"


def test_a_worker_tells_the_scheduler_its_service_name_and_a_port_that_two_executors_can_have() -> None:
    for service in ("worker-a", "worker-b"):
        config = load_config(WorkerConfig, DEPLOY / "config" / "compose" / f"{service}.json")
        assert (config.worker_id, config.executor.advertise) == (service, service)
        assert config.executor.listen == "0.0.0.0:0"


@pytest.mark.parametrize("name", ["compose.yaml", *OVERLAYS])
def test_only_the_gateway_is_published_and_the_pages_of_observability(name: str) -> None:
    published = {
        service: described["ports"]
        for service, described in read(name)["services"].items()
        if described.get("ports")
    }
    allowed = {"compose.yaml": {"gateway"}, "compose.observability.yaml": {"grafana", "jaeger"}}
    assert published.keys() == allowed.get(name, set())
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_every_service_of_ours_is_confined() -> None:
    for service, described in read("compose.yaml")["services"].items():
        assert described["read_only"] is True, service
        assert described["cap_drop"] == ["ALL"], service
        assert described["security_opt"] == ["no-new-privileges:true"], service
        assert described["mem_limit"], service
        assert described["logging"]["options"]["max-size"], service


@pytest.mark.parametrize("name", ["compose.yaml", *OVERLAYS])
def test_compose_files_satisfy_the_old_and_the_new_compose(name: str) -> None:
    assert not {"name", "version"} & read(name).keys()


def test_recreating_a_worker_can_touch_no_other_service_that_runs() -> None:
    services = read("compose.yaml")["services"]
    needed = {name: set(described.get("depends_on", {})) for name, described in services.items()}
    assert all(names <= ONE_SHOT for names in needed.values()), needed
    assert all(services[name]["restart"] == "no" for name in ONE_SHOT)


def test_each_service_speaks_by_a_certificate_of_its_own_and_sees_no_other_ones_key() -> None:
    document = read("compose.yaml")
    services = document["services"]
    made = dict(volume.split(":") for volume in services["certificates"]["volumes"])
    for service, role in ROLES.items():
        volumes = [volume for volume in services[service]["volumes"] if volume.startswith("certificates")]
        (mounted,) = volumes
        volume, folder, mode = mounted.split(":")
        assert (folder, mode) == ("/etc/chipmesh/tls", "ro")
        assert made[volume] == f"/certificates/{folder_name(role)}"
        assert sum(mounted in each.get("volumes", []) for each in services.values()) == 1
    assert made.keys() == {name for name in document["volumes"] if name.startswith("certificates")}
    for files in configurations("compose.yaml").values():
        config = load_config(ServiceTls, files["05-tls.json"])
        assert config.tls.certificate == Path("/etc/chipmesh/tls/certificate.pem")
        assert config.tls.scheduler == ROLES["scheduler"].name


def test_the_one_shot_step_makes_a_certificate_of_each_service_and_of_an_operator() -> None:
    words = read("compose.yaml")["services"]["certificates"]["command"].split()
    assert words[:3] == ["certs", "create", "/certificates"]
    named = {(role.removeprefix("--"), name) for role, name in zip(words[3::2], words[4::2], strict=True)}
    assert named == {(peer.role.value, peer.name) for peer in ROLES.values()}
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    for peer in ROLES.values():
        assert folder_name(peer) in dockerfile, "an empty volume must take over the owner of this folder"


def test_the_example_of_an_environment_names_what_the_compose_files_read_and_nothing_else() -> None:
    text = "".join((DEPLOY / name).read_text(encoding="utf-8") for name in ("compose.yaml", *OVERLAYS))
    read_there = {piece.split(":-")[0] for piece in text.split("${")[1:]}
    lines = (DEPLOY / ".env.example").read_text(encoding="utf-8").splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert given.keys() - {"COMPOSE_PROJECT_NAME"} == read_there
    defaults = dict(piece.split("}")[0].split(":-") for piece in text.split("${")[1:])
    assert {name: given[name] for name in defaults} == defaults


def test_prometheus_reads_the_alert_rules_that_the_overlay_mounts() -> None:
    config = yaml.safe_load((DEPLOY / "observability" / "prometheus.yaml").read_text(encoding="utf-8"))
    mounts = read("compose.observability.yaml")["services"]["prometheus"]["volumes"]
    targets = [mount.split(":")[1] for mount in mounts if (DEPLOY / mount.split(":")[0]).is_file()]
    assert config["rule_files"] == [target for target in targets if target.endswith("alerts.yaml")]
