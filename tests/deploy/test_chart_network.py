"""From outside only the gateway is reached; inside, each service by those alone that have to reach it."""

from __future__ import annotations

import pytest

from tests.deploy.chart import NAMESPACE, VALUES, Rendered, Values, read_values, render
from tests.deploy.network import OUTSIDE, Peer, may_connect

GATEWAY, OPENAI, SCHEDULER, EXECUTOR, HTTP, SUPERVISOR = 50051, 8000, 50061, 50100, 8080, 50071
PORTS = (GATEWAY, OPENAI, SCHEDULER, EXECUTOR, 50999, 51000, HTTP, SUPERVISOR, 22, 443)

PUBLIC = {("gateway", GATEWAY), ("gateway", OPENAI)}


def services(rendered: Rendered) -> dict[str, Peer]:
    """One pod of each component, by the component's name."""
    found: dict[str, Peer] = {}
    for name, pod in rendered.pods().items():
        labels = pod["metadata"]["labels"]
        component = labels["app.kubernetes.io/component"]
        found.setdefault(component, Peer(name, NAMESPACE, labels))
    return found


def reached(rendered: Rendered, source: Peer) -> set[tuple[str, int]]:
    """Components and ports that `source` may connect to."""
    policies = rendered.of_kind("NetworkPolicy")
    return {
        (component, port)
        for component, target in services(rendered).items()
        for port in PORTS
        if may_connect(policies, source, target, port, namespace=NAMESPACE)
    }


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("namespace", [OUTSIDE, NAMESPACE, "kube-system"])
def test_who_is_not_of_the_mesh_reaches_the_gateways_ports_and_nothing_else(
    name: str, namespace: str
) -> None:
    stranger = Peer("stranger", namespace, {"app": "stranger"})
    assert reached(render(read_values(name)), stranger) == PUBLIC


@pytest.mark.parametrize("name", [name for name in VALUES if name != "tensor-parallel"])
def test_services_reach_those_that_they_need_and_no_other(name: str) -> None:
    rendered = render(read_values(name))
    peers = services(rendered)
    expected = {
        "gateway": {("scheduler", SCHEDULER)},
        "scheduler": {("worker", EXECUTOR), ("worker", 50999)},
        "worker": {("scheduler", SCHEDULER)},
    }
    for component, targets in expected.items():
        # A gateway is a client like any other where everyone is.
        assert reached(rendered, peers[component]) - PUBLIC == targets, component


def test_ranks_of_a_group_reach_each_other() -> None:
    rendered = render(read_values("tensor-parallel"))
    policies = rendered.of_kind("NetworkPolicy")
    worker = services(rendered)["worker"]
    stranger = Peer("other", NAMESPACE, {**worker.labels, "chipmesh.io/group": "other"})
    assert may_connect(policies, worker, worker, 29500, namespace=NAMESPACE)
    assert not may_connect(policies, stranger, worker, 29500, namespace=NAMESPACE)


def test_only_named_clients_reach_a_gateway_that_names_some() -> None:
    client = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}
    rendered = render({"networkPolicy": {"clients": [client]}})
    assert reached(rendered, Peer("client", "apps", {})) == PUBLIC
    assert reached(rendered, Peer("client", OUTSIDE, {})) == set()


def test_prometheus_reaches_the_health_and_metrics_of_all_services() -> None:
    rendered = render(read_values("observability"))
    prometheus = Peer("prometheus", "monitoring", {})
    assert reached(rendered, prometheus) == {
        *PUBLIC, ("gateway", HTTP), ("scheduler", HTTP), ("worker", HTTP),
    }  # fmt: skip


def test_services_look_names_up_send_spans_and_reach_nothing_else_outside() -> None:
    rendered = render(read_values("observability"))
    policies = rendered.of_kind("NetworkPolicy")

    def leaves(component: str, namespace: str, port: int, protocol: str = "TCP") -> bool:
        source, target = services(rendered)[component], Peer("target", namespace, {})
        return may_connect(policies, source, target, port, namespace=NAMESPACE, protocol=protocol)

    for component in ("gateway", "scheduler", "worker"):
        assert leaves(component, "kube-system", 53, "UDP")
        assert leaves(component, "observability", 4317)
        assert not leaves(component, OUTSIDE, 443)
        assert not leaves(component, OUTSIDE, 53)
        assert not leaves(component, OUTSIDE, 4317)
    assert leaves("models", OUTSIDE, 443), "it fetches models"


@pytest.mark.parametrize("name", VALUES)
def test_only_the_gateway_has_a_service_that_can_be_published(name: str) -> None:
    values: Values = {**read_values(name)}
    values["gateway"] = {**values.get("gateway", {}), "service": {"type": "LoadBalancer"}}
    rendered = render(values)
    published = {
        item["metadata"]["name"]: [port["port"] for port in item["spec"]["ports"]]
        for item in rendered.of_kind("Service")
        if item["spec"].get("type", "ClusterIP") != "ClusterIP"
    }
    assert published == {"chipmesh-gateway": [GATEWAY, OPENAI]}
    assert rendered.of_kind("Ingress") == []
    for pod in rendered.pods().values():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
        assert not any("hostPort" in port for port in ports)


def test_without_policies_the_notes_warn() -> None:
    rendered = render({"networkPolicy": {"enabled": False}})
    assert rendered.of_kind("NetworkPolicy") == []
    assert "WARNING: networkPolicy.enabled is false" in rendered.notes
