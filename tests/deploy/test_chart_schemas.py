"""What the chart renders is what Kubernetes takes, by the schemas of an old and of a new release."""

from __future__ import annotations

import copy
from typing import Any

import helm_python
import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.deploy.chart import CHART, VALUES, Manifest, read_values, render
from tests.deploy.custom_resources import SPECS, schema_of

OLDEST = "1.27"  # Chart.yaml's kubeVersion
NEWEST = "1.37"
CUSTOM = {kind for _, kind in SPECS}
WARNING = 2


def validate(manifest: Manifest, release: str) -> None:
    kubernetes_validate.validate(manifest, release, strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    report = helm_python.lint(CHART, read_values(name), strict=True, namespace="serving")
    assert report["errors"] == []
    assert [item for item in report["messages"] if item["severity"] >= WARNING] == []


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", VALUES)
def test_every_object_is_valid_and_has_no_field_that_kubernetes_does_not_know(
    name: str, release: str
) -> None:
    rendered = render(read_values(name))
    assert len(rendered.manifests) > 15
    for manifest in rendered.manifests:
        if manifest["kind"] in CUSTOM:
            jsonschema.Draft202012Validator(schema_of(manifest)).validate(manifest)
        else:
            validate(manifest, release)


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_the_pods_of_a_leader_worker_set_are_valid_pods(release: str) -> None:
    rendered = render(read_values("tensor-parallel"))
    (item,) = rendered.of_kind("LeaderWorkerSet")
    template = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
    validate(pod, release)


def test_all_custom_resources_that_have_a_schema_are_rendered_by_some_file_of_values() -> None:
    rendered = {
        (item["apiVersion"], item["kind"])
        for name in VALUES
        for item in render(read_values(name)).of_kind(*CUSTOM)
    }
    assert rendered == set(SPECS)


def test_an_object_with_a_wrong_field_is_found() -> None:
    wrong: Manifest = render({}).one("Deployment", "chipmesh-gateway")
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyRootFileSystem"):
        validate(wrong, NEWEST)


@pytest.mark.parametrize("name", VALUES)
def test_no_two_objects_of_one_kind_have_one_name(name: str) -> None:
    keys = [(item["kind"], item["metadata"]["name"]) for item in render(read_values(name)).manifests]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", VALUES)
def test_what_pods_mount_is_there_or_is_what_the_notes_say_that_has_to_be(name: str) -> None:
    rendered = render(read_values(name))
    config_maps = {item["metadata"]["name"] for item in rendered.of_kind("ConfigMap")}
    claims = {item["metadata"]["name"] for item in rendered.of_kind("PersistentVolumeClaim")}
    secrets = {item["spec"]["secretName"] for item in rendered.of_kind("Certificate")}
    for pod in rendered.pods().values():
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "projected" in volume and secrets:
                assert {source["secret"]["name"] for source in volume["projected"]["sources"]} <= secrets


@pytest.mark.parametrize("name", VALUES)
def test_every_mount_has_its_volume_and_every_volume_is_mounted(name: str) -> None:
    for pod in render(read_values(name)).pods().values():
        spec: dict[str, Any] = pod["spec"]
        volumes = [volume["name"] for volume in spec["volumes"]]
        mounted = {
            mount["name"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]
            for mount in container["volumeMounts"]
        }
        assert sorted(volumes) == sorted(mounted)
