"""The chart, rendered by Helm's own library without a cluster, and its objects as plain dictionaries."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml  # type: ignore[import-untyped]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "chipmesh"
RELEASE, NAMESPACE = "chipmesh", "serving"
VALUES = {"default": CHART / "values.yaml"} | {
    path.stem: path for path in sorted((DEPLOY / "helm" / "values").glob("*.yaml"))
}
"""All files of values that we ship, by name."""

Values = dict[str, Any]
Manifest = dict[str, Any]


def read_values(name: str) -> Values:
    """What a shipped file of values says."""
    values: Values = yaml.safe_load(VALUES[name].read_text(encoding="utf-8"))
    return values


@dataclass(frozen=True)
class Rendered:
    """A rendered chart. notes: what Helm prints after an installation."""

    manifests: tuple[Manifest, ...]
    notes: str

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """All objects of these kinds."""
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def one(self, kind: str, name: str) -> Manifest:
        """The object of this kind and name."""
        (found,) = [item for item in self.of_kind(kind) if item["metadata"]["name"] == name]
        return found

    def pods(self) -> dict[str, Manifest]:
        """Templates of all pods, {"metadata", "spec"}, by the name of what makes them."""
        return {item["metadata"]["name"]: _pod_template(item) for item in self.of_kind(*_POD_TEMPLATES)}


_POD_TEMPLATES: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "LeaderWorkerSet": ("spec", "leaderWorkerTemplate", "workerTemplate"),
}


def _pod_template(item: Manifest) -> Manifest:
    for field in _POD_TEMPLATES[item["kind"]]:
        item = item[field]
    return item


def render(values: Values) -> Rendered:
    """What Kubernetes would get.

    Raises:
        helm_python.HelmError: the values are refused.
    """
    files = load_chart().render(values=values, name=RELEASE, namespace=NAMESPACE)
    notes = files.pop(f"{CHART.name}/templates/NOTES.txt")
    documents = [item for text in files.values() for item in yaml.load_all(text, Loader=yaml.CSafeLoader)]
    return Rendered(tuple(item for item in documents if item), notes)


@cache
def load_chart() -> helm_python.Chart:
    """The chart itself, which does not change."""
    return helm_python.Chart.load(CHART)


def containers(pod: Manifest) -> Iterator[Manifest]:
    """All containers of a pod, those that run first, too."""
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def written_configuration(
    rendered: Rendered,
    pod: Manifest,
    folder: Path,
    *,
    pod_name: str,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """What the pod's service finds as /etc/chipmesh: a folder, filled as its ConfigMap and init container do.

    pod_name: as Kubernetes would call it; its address is 10.1.2.3. environment: what the LeaderWorkerSet
    controller adds; None: for the first pod of a set.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    target = folder / "configuration"
    if "configMap" in volumes["configuration"]:
        _write_config_map(rendered, volumes["configuration"], target)
        return target
    source = folder / "group"
    _write_config_map(rendered, volumes["group"], source)
    target.mkdir()
    (identity,) = [item for item in containers(pod) if item["name"] == "identity"]
    script = identity["args"][0].replace("/etc/chipmesh-group/", f"{source}/")
    script = script.replace(" /etc/chipmesh/", f" {target}/")
    first = {"LWS_LEADER_ADDRESS": f"{pod_name}.service.{NAMESPACE}", "LWS_WORKER_INDEX": "0"}
    fields = {"metadata.name": pod_name, "status.podIP": "10.1.2.3"}
    given = {item["name"]: fields[item["valueFrom"]["fieldRef"]["fieldPath"]] for item in identity["env"]}
    subprocess.run(
        [*identity["command"], script],
        env={"PATH": os.environ["PATH"], **given, **(environment or first)},
        check=True,
    )
    return target


def _write_config_map(rendered: Rendered, volume: Manifest, folder: Path) -> None:
    folder.mkdir()
    for name, text in rendered.one("ConfigMap", volume["configMap"]["name"])["data"].items():
        json.loads(text)
        (folder / name).write_text(text, encoding="utf-8")
