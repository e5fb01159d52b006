"""What NetworkPolicies allow, as Kubernetes defines it: enough of it to ask who may connect to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.deploy.chart import Manifest

OUTSIDE = "outside"
"""A namespace that is neither ours nor named by any policy."""


@dataclass(frozen=True)
class Peer:
    """A pod, or something that has no pod's labels. namespace: its `kubernetes.io/metadata.name`."""

    name: str
    namespace: str
    labels: Mapping[str, str]


def may_connect(
    policies: Sequence[Manifest],
    source: Peer,
    target: Peer,
    port: int,
    *,
    namespace: str,
    protocol: str = "TCP",
) -> bool:
    """Whether `source` may open `port` of `target` under `policies`, which are of `namespace`.

    Both ends have to allow it; an end that no policy selects allows everything.
    """
    leaves = _allows(policies, "Egress", source, target, port, namespace, protocol)
    return leaves and _allows(policies, "Ingress", target, source, port, namespace, protocol)


def _allows(
    policies: Iterable[Manifest],
    direction: str,
    own: Peer,
    other: Peer,
    port: int,
    namespace: str,
    protocol: str,
) -> bool:
    selecting = [
        policy["spec"]
        for policy in policies
        if own.namespace == namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    peers = {"Ingress": "from", "Egress": "to"}[direction]
    return not selecting or any(
        _has_port(rule.get("ports"), port, protocol) and _has_peer(rule.get(peers), other, namespace)
        for rule in rules
    )


def _has_port(ports: list[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        item.get("protocol", "TCP") == protocol and item["port"] <= port <= item.get("endPort", item["port"])
        for item in ports
    )


def _has_peer(peers: list[dict[str, Any]] | None, other: Peer, namespace: str) -> bool:
    return not peers or any(_is_peer(peer, other, namespace) for peer in peers)


def _is_peer(peer: dict[str, Any], other: Peer, namespace: str) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}, "this model knows no address ranges"
    selector = peer.get("namespaceSelector")
    if selector is None:
        same_namespace = other.namespace == namespace
    else:
        same_namespace = _selects(selector, {"kubernetes.io/metadata.name": other.namespace})
    return same_namespace and _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "this model knows labels that match, and nothing else"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
