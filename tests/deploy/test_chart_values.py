"""Wrong values are refused before anything is installed, by the name of the field; each one is described."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import helm_python
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.deploy.chart import CHART, VALUES, Values, load_chart, read_values, render

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
GROUP = {"name": "a", "model": "smollm2-135m", "backend": "cpu"}


def group(**fields: object) -> Values:
    return {"groups": [{**GROUP, **fields}]}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"gatewayy": {}}, "gatewayy"),
        ({"gateway": {"replicas": 0}}, "/gateway/replicas"),
        ({"gateway": {"replicas": "two"}}, "/gateway/replicas"),
        ({"gateway": {"drainSeconds": -1}}, "/gateway/drainSeconds"),
        ({"gateway": {"config": {"listen": "0.0.0.0:1"}}}, "/gateway/config/listen"),
        ({"gateway": {"config": {"tls": None}}}, "/gateway/config/tls"),
        ({"gateway": {"service": {"type": "ExternalName"}}}, "/gateway/service/type"),
        ({"gateway": {"keys": {"entries": [{"name": "a b"}]}}}, "/gateway/keys/entries/0/name"),
        (
            {"gateway": {"keys": {"entries": [{"name": "a", "sha256": "1"}]}}},
            "/gateway/keys/entries/0/sha256",
        ),
        ({"gateway": {"keys": {"entries": [{"name": "a", "limit": 1}]}}}, "limit"),
        ({"gateway": {"resources": {"limit": {}}}}, "/gateway/resources"),
        ({"scheduler": {"replicas": 2}}, "replicas"),
        ({"scheduler": {"config": {"groups": []}}}, "/scheduler/config/groups"),
        ({"groups": []}, "/groups"),
        (group(name="Upper"), "/groups/0/name"),
        (group(name="a-name-that-is-too-long"), "/groups/0/name"),
        (group(gpus=1), "gpus"),
        (group(weight=-1), "/groups/0/weight"),
        (group(ranks=0), "/groups/0/ranks"),
        (group(config={"worker_id": "w"}), "/groups/0/config/worker_id"),
        (group(scheduling={"weight": 3}), "/groups/0/scheduling/weight"),
        (group(backendOptions={"emulate": True}), "/groups/0/backendOptions/emulate"),
        (group(hostFolders=[{"name": "x", "path": "relative"}]), "/groups/0/hostFolders/0/path"),
        (
            group(autoscaling={"minReplicas": 0, "maxReplicas": 1, "queuedRequests": 1}),
            "/groups/0/autoscaling/minReplicas",
        ),
        ({"models": {"served": []}}, "/models/served"),
        ({"models": {"claim": {"accessMode": "ReadOnlyMany"}}}, "/models/claim/accessMode"),
        ({"models": {"pull": ["a; rm"]}}, "/models/pull/0"),
        ({"tls": {"mode": "off"}}, "/tls/mode"),
        ({"tls": {"certManager": {"issuer": {"kind": "Authority"}}}}, "/tls/certManager/issuer/kind"),
        ({"networkPolicy": {"executorPorts": {"from": 80}}}, "/networkPolicy/executorPorts/from"),
        ({"tracing": {"endpoint": "collector:4317"}}, "/tracing/endpoint"),
        ({"tracing": {"samplingRatio": 2}}, "/tracing/samplingRatio"),
        ({"tracing": {"maxTracesPerSecond": 0}}, "/tracing/maxTracesPerSecond"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(values: Values, field: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render(values)
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"groups": [GROUP, GROUP]}, ["groups", '"a"', "twice"]),
        (group(model="other"), ["groups", '"a"', '"other"', "models.served"]),
        (group(ranks=2), ["groups", '"a"', "tensorParallel.enabled"]),
        (
            group(autoscaling={"minReplicas": 1, "maxReplicas": 2, "queuedRequests": 1}),
            ["groups", '"a"', "keda.prometheusAddress"],
        ),
        (
            {
                **group(autoscaling={"minReplicas": 3, "maxReplicas": 2, "queuedRequests": 1}),
                "keda": {"prometheusAddress": "http://p:9090"},
            },
            ["groups", '"a"', "minReplicas"],
        ),
        ({"gateway": {"autoscaling": {"minReplicas": 11}}}, ["gateway.autoscaling", "minReplicas"]),
        ({"gateway": {"keys": {"entries": []}}}, ["gateway.keys.entries", "gateway.allowAnonymous"]),
        ({"networkPolicy": {"executorPorts": {"from": 50100, "to": 50150}}}, ["executorPorts", "100"]),
        ({"models": {"claim": {"enabled": False}}}, ["models.pull", "models.claim.enabled"]),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_with_the_way_out(
    values: Values, words: list[str]
) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refused:
        render(values)
    assert [word for word in words if word not in str(refused.value)] == []


def parts(schema: dict[str, Any], path: str = "values") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object and field of the schema with its path; `false` (a field that is refused) is none."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        if isinstance(inner, dict):
            yield from parts(inner, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from parts(schema["items"], f"{path}[]")


ALL_PARTS = [*parts(SCHEMA), *parts(SCHEMA["definitions"]["resources"], "resources")]


def test_every_field_of_the_values_is_described() -> None:
    fields = [(path, part) for path, part in ALL_PARTS if not path.endswith("[]") and "$ref" not in part]
    assert len(fields) > 90
    assert [path for path, part in fields if not part.get("description")] == []


def test_every_object_with_known_fields_refuses_unknown_ones() -> None:
    # `config` and `scheduling` are a service's own fields: its own model checks them, see
    # test_chart_configuration.py.
    own = ("config", "scheduling")
    known = [(path, part) for path, part in ALL_PARTS if "properties" in part and not path.endswith(own)]
    assert len(known) > 20
    assert [path for path, part in known if part["additionalProperties"] is not False] == []


def test_the_schema_is_one_and_takes_every_file_of_values_that_we_ship() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    defaults = read_values("default")
    for name in VALUES:
        merged = load_chart().merge_values(read_values(name))
        jsonschema.Draft7Validator(SCHEMA).validate(merged)
    assert defaults.keys() == SCHEMA["properties"].keys() - {"global"}


def test_a_weight_that_changes_restarts_no_pod() -> None:
    values = read_values("mixed")
    changed = copy.deepcopy(values)
    changed["groups"][0]["weight"], changed["groups"][1]["weight"] = 50, 50
    before, after = render(values), render(changed)
    assert before.pods() == after.pods()
    traffic = [json.loads(item.one("ConfigMap", "chipmesh-traffic")["data"]["traffic.json"])
               for item in (before, after)]  # fmt: skip
    assert traffic == [{"qwen2.5-7b": {"cuda": 80, "kunlun": 20}}, {"qwen2.5-7b": {"cuda": 50, "kunlun": 50}}]


def test_a_new_key_restarts_no_pod() -> None:
    more = {"gateway": {"keys": {"entries": [{"name": "default"}, {"name": "team-b"}]}}}
    assert render({}).pods() == render(more).pods()


def test_a_changed_configuration_restarts_the_pods_that_read_it_and_no_other() -> None:
    before = render({}).pods()
    after = render({"gateway": {"config": {"max_live_requests": 8}}}).pods()
    assert {name for name in before if before[name] != after[name]} == {"chipmesh-gateway"}


def test_another_chip_for_a_group_changes_its_workers_alone() -> None:
    values = read_values("kunlun-emulated")
    swapped = copy.deepcopy(values)
    swapped["groups"][1] |= {"backend": "cpu", "backendOptions": {}}
    before, after = render(values).pods(), render(swapped).pods()
    assert {name for name in before if before[name] != after[name]} == {"chipmesh-worker-kunlun"}


def test_the_number_of_replicas_is_left_to_what_scales_them() -> None:
    rendered = render(read_values("observability"))
    assert "replicas" not in rendered.one("StatefulSet", "chipmesh-worker-cpu")["spec"]
    rendered = render({"gateway": {"autoscaling": {"enabled": True}}})
    assert "replicas" not in rendered.one("Deployment", "chipmesh-gateway")["spec"]
    assert render({}).of_kind("HorizontalPodAutoscaler", "ScaledObject", "LeaderWorkerSet") == []
