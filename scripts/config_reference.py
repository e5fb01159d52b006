#!/usr/bin/env python3
"""The configuration of every service: `python scripts/config_reference.py` writes docs/configuration.md.

Fields, bounds and defaults are the pydantic models'; what a field means is the text under it in their source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.config import GatewayConfig
from meshkit.config import ServiceConfig
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/configuration.md"
SERVICES: dict[str, type[BaseModel]] = {
    "All services": ServiceConfig,
    "Gateway": GatewayConfig,
    "Scheduler": SchedulerConfig,
    "Worker": WorkerConfig,
}
INTRODUCTION = """\
# Configuration

<!-- Made by scripts/config_reference.py from the models; a test compares the two. -->

Each service reads one JSON file, or a folder of them, once, at its start
([how](operating.md)). **Bold**: required. A dash: not set. Times are in seconds where a name ends in `_s`,
sizes in bytes where it ends in `_bytes`. Tables of the parts that a field holds follow below its own.
"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤",
          "pattern": "matches"}  # fmt: skip
NAMES = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret text",
}
MOST_DIGITS = 6


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Text under each field in the source of a model's class, by the field's name, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields that the model adds to its base."""
    return {name: field for name, field in model.model_fields.items() if name in model.__annotations__}


def parts(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(name as in a file, model) of everything that a model's own fields hold, also of parts of parts."""
    for name, field in own_fields(model).items():
        for each, is_list in _models_in(field.annotation):
            path = f"{prefix}{name}" + ("[]" if is_list else "")
            yield path, each
            yield from parts(each, f"{path}.")


def render() -> str:
    """The whole page."""
    sections = [INTRODUCTION]
    for title, model in SERVICES.items():
        sections.append(f"## {title}\n\n{_table(model)}")
        sections += [f"### `{path}`\n\n{_summary(part)}\n\n{_table(part)}" for path, part in parts(model)]
    return "\n".join(sections)


def _summary(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())


def _table(model: type[BaseModel]) -> str:
    said = meanings(model)
    rows = ["| field | value | default | |", "|---|---|---|---|"]
    for name, field in own_fields(model).items():
        shown = f"**`{name}`**" if field.is_required() else f"`{name}`"
        cells = (shown, _value(field), _default(field), said.get(name, "").replace("|", "\\|"))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _value(field: FieldInfo) -> str:
    return ", ".join([_type(field.annotation), *_bounds(field.metadata)]).replace("|", "\\|")


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for bound in metadata:
        for key, word in BOUNDS.items():
            if (value := getattr(bound, key, None)) is not None:
                yield f"{word} {value if isinstance(value, str) else _number(value)}"


def _type(annotation: Any) -> str:
    if annotation in NAMES:
        return NAMES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(str(each.value) for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    inner = [each for each in get_args(annotation) if each not in (type(None), Ellipsis)]
    origin = get_origin(annotation)
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"object of {_type(inner[1])}"
    if inner and all(isinstance(each, str) for each in inner):
        return ", ".join(inner)
    if hasattr(annotation, "__metadata__"):
        return ", ".join([_type(inner[0]), *_bounds(annotation.__metadata__)])
    return " or ".join(_type(each) for each in inner)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        return "its fields'"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | dict):
        return "empty" if not value else str(value)
    return _number(value) if isinstance(value, int | float) else f"`{value}`" if value else "empty"


def _number(value: float) -> str:
    if isinstance(value, int) and len(str(value)) > MOST_DIGITS and value % 2**20 == 0:
        return f"{value >> 20} × 2²⁰"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _models_in(annotation: Any, *, is_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_list
    is_list = is_list or get_origin(annotation) in (list, tuple)
    for inner in get_args(annotation):
        yield from _models_in(inner, is_list=is_list)


def undocumented() -> list[str]:
    """Fields that say nothing of themselves."""
    models = [*SERVICES.values(), *(part for model in SERVICES.values() for _, part in parts(model))]
    return sorted(
        {
            f"{model.__name__}.{name}"
            for model in models
            for name in own_fields(model)
            if not meanings(model).get(name)
        }
    )


if __name__ == "__main__":
    REFERENCE.write_text(render(), encoding="utf-8")
    for each in undocumented():
        print(f"no text under {each}")
