"""JSON schemas whose outputs end soon, whatever a small model says: every length is bounded."""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "pattern": "^[A-Za-z]{1,10}$"}
SHORT = {"type": "string", "maxLength": 12}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}
_LIST_NODE = {"anyOf": [{"type": "null"}, _object(head={"type": "boolean"}, tail={"const": None})]}

SCHEMAS: list[dict[str, Any]] = [
    _object(name=WORD, age=AGE),
    _object(colour={"enum": ["red", "green", "blue"]}),
    _object(ok={"type": "boolean"}, why=SHORT),
    {"type": "array", "items": AGE, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [WORD, AGE, {"type": "null"}], "minItems": 3, "items": False},
    {"enum": ["yes", "no", 7, None, True]},
    {"const": {"fixed": [1, 2, "three"]}},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    _object(id={"type": "string", "format": "uuid"}, on={"type": "string", "format": "date"}),
    {"anyOf": [_object(a=AGE), _object(b=WORD), {"type": "null"}]},
    _object(point=_object(x={"type": "integer", "minimum": 0, "maximum": 99}, y=AGE), tag=WORD),
    {"type": "array", "items": _object(k=WORD, v={"type": "boolean"}), "minItems": 1, "maxItems": 2},
    {
        "$ref": "#/$defs/pair",
        "$defs": {"pair": _object(left={"$ref": "#/$defs/leaf"}, right=WORD), "leaf": AGE},
    },
    _object(kind={"const": "ship"}, size={"type": "integer", "exclusiveMinimum": 0, "maximum": 9}),
    {**_object(a=WORD, b=AGE), "required": ["a"]},
    _object(list=_LIST_NODE, unicode={"enum": ["ü", "日本", "🚢", 'quote " and \\']}),
]
