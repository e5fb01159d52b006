"""What a PromQL expression asks for, and whether a running mesh has it: names, labels, values of labels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus itself puts on everything."""


@dataclass
class Family:
    """A metric as some service shows it. labels: of its samples, None where it has none now."""

    type: str
    labels: frozenset[str] | None = None
    values: dict[str, set[str]] = field(default_factory=dict)


@dataclass
class Shown:
    """All that a mesh shows. series: by the name that a query uses (`_bucket`, `_count` and so on)."""

    families: dict[tuple[str, str], Family] = field(default_factory=dict)
    """By service and exposed name without the prefix, counters with `_total`."""
    series: dict[str, Family] = field(default_factory=lambda: {"up": Family("gauge", SCRAPED)})

    def add(self, service: str, page: str, *, prefix: str) -> None:
        """Take in a /metrics page."""
        for family in text_string_to_metric_families(page):
            name = family.name.removeprefix(prefix) + ("_total" if family.type == "counter" else "")
            shown = self.families.setdefault((service, name), Family(family.type))
            self.series.setdefault(family.name, Family(family.type))
            for sample in family.samples:
                _take_in(shown, {key: value for key, value in sample.labels.items() if key != "le"})
                _take_in(self.series.setdefault(sample.name, Family(family.type)), sample.labels)


def _take_in(family: Family, labels: Mapping[str, str]) -> None:
    family.labels = (family.labels or frozenset()) | labels.keys()
    for name, value in labels.items():
        family.values.setdefault(name, set()).add(value)


class Wrong(AssertionError):
    """The mesh has not what an expression asks for."""


def labels_of(expression: str, shown: Shown) -> Set[str]:
    """The labels of its result, by which a legend or an alert's text may speak.

    Raises:
        Wrong: a metric, a label or a label's value that the mesh does not show.
        ValueError: it does not parse.
    """
    return _labels(promql.parse(re.sub(r"\$__rate_interval|\$__interval|\$__range", "5m", expression)), shown)


def _labels(node: Any, shown: Shown) -> Set[str]:
    match node:
        case promql.VectorSelector():
            return _selected(node, shown)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, shown)
        case promql.AggregateExpr():
            return _aggregated(node, shown)
        case promql.Call():
            return _called(node, shown)
        case promql.BinaryExpr():
            return _combined(node, shown)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(node.expr, shown)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
    raise Wrong(f"{type(node).__name__} is not known to this check")


def _selected(selector: Any, shown: Shown) -> Set[str]:
    family = shown.series.get(selector.name)
    if family is None:
        raise Wrong(f"no service shows {selector.name}")
    if family.labels is None:
        raise Wrong(f"{selector.name} has no series in the mesh that was looked at")
    labels = family.labels | SCRAPED
    for matcher in selector.matchers.matchers:
        _require({matcher.name}, labels, selector.name)
        is_exact = matcher.op == promql.MatchOp.Equal and matcher.name not in SCRAPED
        if is_exact and matcher.value not in family.values[matcher.name] | ALLOWED.get(
            matcher.name, frozenset()
        ):
            raise Wrong(f"{selector.name} has no {matcher.name}={matcher.value!r}")
    return labels


ALLOWED: Mapping[str, Set[str]] = {
    "choice": frozenset({"native", "fused", "padded", "decomposed", "reference"})
}
"""Values that a chip may show and the one that was looked at does not."""


def _aggregated(node: Any, shown: Shown) -> Set[str]:
    labels = _labels(node.expr, shown)
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    _require(named, labels, node.prettify())
    return named if node.modifier.type == promql.AggModifierType.By else labels - named


def _called(node: Any, shown: Shown) -> Set[str]:
    found = [_labels(argument, shown) for argument in node.args]
    if node.func.name == "histogram_quantile":
        _require({"le"}, found[1], node.prettify())
        return found[1] - {"le"}
    return frozenset().union(*found)


def _combined(node: Any, shown: Shown) -> Set[str]:
    left, right = _labels(node.lhs, shown), _labels(node.rhs, shown)
    matching = None if node.modifier is None else node.modifier.matching
    if matching is not None:
        for side in (left, right):
            _require(frozenset(matching.labels), side, node.prettify())
    elif left != right and right and left:
        raise Wrong(f"its sides have other labels ({sorted(left)} and {sorted(right)}): {node.prettify()}")
    return left or right


def _require(wanted: Set[str], there: Set[str], what: str) -> None:
    if missing := wanted - there:
        raise Wrong(f"{what} has no label {', '.join(sorted(missing))}; it has {', '.join(sorted(there))}")
