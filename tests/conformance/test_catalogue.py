"""The catalogue says of each operator what OperatorSet says, and its numbers fit together."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.conformance.cases import make_case
from plugins.sdk.catalogue import CATALOGUE, UNIT_ROUNDOFF, OpSpec, ShapeClass, Tolerance, evaluate, holds
from plugins.sdk.operators import REFERENCE, OperatorSet

ROOT = Path(__file__).resolve().parents[2]
SPECS = list(CATALOGUE.values())
LIGHT = [
    pytest.param(spec, each, id=f"{spec.name}-{each.name}")
    for spec in SPECS
    for each in spec.shape_classes
    if not each.heavy
]


def test_no_operator_is_missing() -> None:
    assert list(CATALOGUE) == list(REFERENCE)


@pytest.mark.parametrize("spec", SPECS, ids=list(CATALOGUE))
def test_signatures_match_the_contract(spec: OpSpec) -> None:
    signature = inspect.signature(getattr(OperatorSet, spec.name))
    parameters = list(signature.parameters.values())[1:]
    named = [tensor.name for tensor in spec.inputs] + [number.name for number in spec.attributes]
    assert [parameter.name for parameter in parameters] == named
    for tensor, parameter in zip(spec.inputs, parameters, strict=False):
        assert parameter.annotation in {"Tensor", "Tensor | None", "Any"}
        assert tensor.optional is (parameter.annotation == "Tensor | None")
    for attribute, parameter in zip(spec.attributes, parameters[len(spec.inputs) :], strict=True):
        assert parameter.annotation == attribute.kind
    several = ", ".join("Tensor" for _ in spec.outputs)
    returned = {0: "None", 1: "Tensor"}.get(len(spec.outputs), f"tuple[{several}]")
    assert signature.return_annotation == returned


@pytest.mark.parametrize("spec", SPECS, ids=list(CATALOGUE))
def test_every_shape_class_has_every_symbol_and_a_name_of_its_own(spec: OpSpec) -> None:
    names = [each.name for each in spec.shape_classes]
    assert len(set(names)) == len(names)
    assert set(spec.dtypes) <= UNIT_ROUNDOFF.keys()
    assert set(spec.writes) <= {tensor.name for tensor in spec.inputs}
    for shape_class in spec.shape_classes:
        for tensor in (*spec.inputs, *spec.outputs):
            assert min(tensor.sizes(shape_class.sizes)) > 0
            if not tensor.tolerance.exact:
                coefficients = tensor.tolerance.coefficients("bfloat16", "float32", shape_class.sizes)
                assert 0 < max(coefficients) < 0.1


def test_attention_covers_head_sizes_groups_and_odd_pages() -> None:
    for name in ("attention_prefill", "attention_decode"):
        sizes = [each.sizes for each in CATALOGUE[name].shape_classes]
        assert {64, 128} <= {each["D"] for each in sizes}
        assert {1, 3, 8} <= {each["H"] // each["G"] for each in sizes}
        assert any(each["S"] % 2 for each in sizes)
    for each in CATALOGUE["attention_prefill"].shape_classes:
        assert each.sizes["M"] == -(-(each.sizes["X"] + each.sizes["T"]) // each.sizes["S"])


@pytest.mark.parametrize(("spec", "shape_class"), LIGHT)
def test_cases_have_the_forms_of_the_catalogue_and_are_the_same_every_time(
    spec: OpSpec, shape_class: ShapeClass
) -> None:
    case = make_case(spec, shape_class, dtype=spec.dtypes[0], kv_dtype="float32")
    again = make_case(spec, shape_class, dtype=spec.dtypes[0], kv_dtype="float32")
    assert case.attributes.keys() == {attribute.name for attribute in spec.attributes}
    for tensor in spec.inputs:
        if tensor.optional and tensor.name not in case.inputs:
            continue
        value = case.inputs[tensor.name]
        assert tuple(value.shape) == tensor.sizes(shape_class.sizes)
        assert value.equal(again.inputs[tensor.name])


def test_a_tolerance_follows_its_formula() -> None:
    tolerance = Tolerance(roundings=2, rounded="|y|", terms="K+P*S", summed="|y|")
    sizes = {"K": 4, "P": 3, "S": 4}
    assert evaluate("K+P*S", sizes) == 16
    assert tolerance.coefficients("bfloat16", "float32", sizes) == (2 * 2.0**-8, 4 * 4 * 2.0**-24)
    assert Tolerance().coefficients("bfloat16", "float32", sizes) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("constraint", "met"),
    [
        ("D % 16 == 0", True),
        ("D in (32, 128)", False),
        ("H % G == 0 and D <= 128", True),
        ("1 < G < 3 or D == 65", False),
        ("H // G * G == H", True),
    ],
)
def test_a_constraint_is_a_comparison_of_symbols(constraint: str, met: bool) -> None:
    assert holds(constraint, {"D": 64, "H": 9, "G": 3}) is met


@pytest.mark.parametrize(
    "constraint", ["D %", "E == 4", "__import__('os')", "D.real == 1", "D == 'x'", "1 % 0"]
)
def test_what_is_no_constraint_is_refused_with_the_symbols_there_are(constraint: str) -> None:
    with pytest.raises(ValueError, match="D, G"):
        holds(constraint, {"D": 64, "G": 3})


def test_the_catalogue_needs_no_tensor_framework() -> None:
    code = "import sys; sys.modules['torch'] = None; import plugins.sdk.catalogue, plugins.conformance.kit"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_kit_imports_the_sdk_and_libraries_and_no_plugin() -> None:
    allowed = (
        "plugins.sdk",
        "plugins.conformance",
        "plugins.verification",
        "meshkit",
        "grpc",
        "google.protobuf",
        "chipmesh",
        "torch",
        "numpy",
        "rich",
    )
    sources = sorted((ROOT / "plugins" / "conformance").glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for name in imported_names(source):
            known = name.split(".", maxsplit=1)[0] in sys.stdlib_module_names
            assert known or name.startswith(allowed), f"{source.name} imports {name}"


def imported_names(source: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names
