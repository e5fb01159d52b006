"""Dashboard, alert rules and the table of metrics speak of what a running mesh shows, and of nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.hash_model import write_hash_model
from tests.support.mesh import running_mesh, token_request
from tests.support.promql import Shown, Wrong, labels_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/observability/mesh.json").read_text(encoding="utf-8"))
RULES_FILE = ROOT / "deploy/observability/alerts.yaml"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
DOCUMENT = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
PREFIX = "chipmesh_"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What the services of a mesh of two groups show after some requests, one group the other's shadow."""
    folder = write_hash_model(tmp_path_factory.mktemp("names"))
    arguments = (
        "--backend",
        "cpu",
        "--backend-option",
        "cpu.kernel=off",
        "--device-groups",
        "hash:0;cpu:0",
        "--max-total-tokens",
        "2048",
    )
    model = ("--model-path", str(folder), "--load-format", "dummy")
    with running_mesh(folder / "state", *arguments, *model) as mesh:
        first, second = (group["name"] for group in mesh.status()["groups"])
        assert mesh.cli("traffic", "shadow", first, second, "--share", "1").returncode == 0
        for number in range(4):
            mesh.client.generate(token_request([number + 1, 2, 3], max_tokens=8))
        mesh.wait_until_idle()
        found = Shown()
        found.add("gateway", mesh.scrape("gateway"), prefix=PREFIX)
        found.add("scheduler", mesh.scrape("scheduler"), prefix=PREFIX)
        for number in range(2):
            found.add("worker", mesh.scrape_worker(number), prefix=PREFIX)
    return found


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_asks_for_what_a_mesh_shows_and_names_its_lines_by_it(
    panel: dict[str, Any], shown: Shown
) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        labels = labels_of(target["expr"], shown)
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target["expr"]


def test_the_dashboards_choices_are_labels_that_a_mesh_shows(shown: Shown) -> None:
    variables = DASHBOARD["templating"]["list"]
    for variable in variables:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
        assert label in (shown.series[metric].labels or ())
    used = {name for panel in PANELS for target in panel["targets"] for name in _variables(target["expr"])}
    assert used == {variable["name"] for variable in variables}


def _variables(expression: str) -> list[str]:
    return [name for name in re.findall(r"\$(\w+)", expression) if not name.startswith("__")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_asks_for_what_a_mesh_shows_and_is_explained(rule: dict[str, Any], shown: Shown) -> None:
    labels = labels_of(rule["expr"], shown)
    text = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert f"`{rule['alert']}`" in DOCUMENT


def test_the_documents_alerts_are_those_of_the_rules() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `Chipmesh")]
    assert {name for row in rows for name in re.findall(r"`(Chipmesh\w+)`", row)} == {
        rule["alert"] for rule in RULES
    }


def _documented() -> dict[tuple[str, str], tuple[str, frozenset[str]]]:
    """(type, labels) by (service, metric)."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]+) \| ([\w, -]+) \| .+ \|$", DOCUMENT, re.MULTILINE)
    return {
        (service, name): (kind, frozenset() if labels == "-" else frozenset(labels.split(", ")))
        for name, kind, services, labels in rows
        for service in services.split(", ")
    }


def test_the_table_of_metrics_has_all_that_a_mesh_shows_and_nothing_else(shown: Shown) -> None:
    documented = _documented()
    exposed = {key: family.type for key, family in shown.families.items()}
    assert {key: kind for key, (kind, _) in documented.items()} == exposed
    seen = {key: family.labels for key, family in shown.families.items() if family.labels is not None}
    assert len(seen) > len(documented) - 10
    assert {key: documented[key][1] for key in seen} == seen


def test_buckets_of_latencies_reach_two_minutes(shown: Shown) -> None:
    for service, name in shown.families:
        if name.endswith("_seconds") and service == "gateway" and name != "loop_lag_seconds":
            bounds = [float(bound) for bound in shown.series[f"{PREFIX}{name}_bucket"].values["le"]]
            assert sorted(bounds)[-2] >= 120, name


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(chipmesh_no_such_total[5m])", "no service shows"),
        ("sum by (colour) (chipmesh_token_usage)", "no label colour"),
        ('chipmesh_token_usage{colour="red"}', "no label colour"),
        ('chipmesh_workers{state="gone"}', "has no state='gone'"),
        (
            "histogram_quantile(0.5, sum by (group) (rate(chipmesh_queue_time_seconds_bucket[5m])))",
            "no label le",
        ),
        ('rate(chipmesh_time_to_first_token_seconds_bucket{le="2.6"}[5m])', "has no le='2.6'"),
        ("chipmesh_token_usage and on (model) chipmesh_cache_hit_rate", "no label model"),
        ("sum by (group) (chipmesh_token_usage) / chipmesh_cache_hit_rate", "other labels"),
    ],
)
def test_the_check_itself_finds_what_a_mesh_does_not_show(expression: str, wrong: str, shown: Shown) -> None:
    with pytest.raises(Wrong, match=wrong):
        labels_of(expression, shown)


def test_the_check_itself_finds_what_does_not_parse(shown: Shown) -> None:
    with pytest.raises(ValueError, match=r"."):
        labels_of("sum by (group (chipmesh_token_usage)", shown)


@pytest.fixture(scope="module")
def promtool() -> str:
    tool = shutil.which("promtool") or shutil.which("promtool", path=ROOT / ".venv-promtool")
    if tool is None:
        pytest.skip("promtool is not there; `bash scripts/promtool.sh` brings it")
    return tool


def test_prometheus_own_tool_takes_the_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", str(RULES_FILE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(promtool: str, tmp_path: Path) -> None:
    for file in (RULES_FILE, ROOT / "tests/data/alerts_test.yaml"):
        shutil.copy(file, tmp_path)
    played = [promtool, "test", "rules", str(tmp_path / "alerts_test.yaml")]
    done = subprocess.run(played, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
