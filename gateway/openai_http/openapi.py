"""The interface as OpenAPI 3.1, made of the models that check the bodies."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic.json_schema import models_json_schema

from gateway.openai_http.bodies import ChatBody, CompletionBody
from gateway.openai_http.scheduling_headers import MAX_TIMEOUT_S, PRIORITY, TIMEOUT
from gateway.validation import MAX_PRIORITY

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_HEADERS = [
    {
        "name": PRIORITY,
        "in": "header",
        "description": "as the body's priority, which goes before it",
        "schema": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    },
    {
        "name": TIMEOUT,
        "in": "header",
        "description": "seconds that the caller waits, then 504; fractions are taken, too",
        "schema": {"type": "integer", "minimum": 1, "maximum": int(MAX_TIMEOUT_S)},
    },
]


def describe() -> dict[str, Any]:
    """The document."""
    _, definitions = models_json_schema(
        [(ChatBody, "validation"), (CompletionBody, "validation")], ref_template=_REF
    )
    bodies = {"/v1/chat/completions": "ChatBody", "/v1/completions": "CompletionBody"}
    paths: dict[str, Any] = {path: {"post": _operation(_ref(name))} for path, name in bodies.items()}
    for path in paths:
        paths[path]["post"]["parameters"] = _HEADERS
    paths["/v1/embeddings"] = {"post": _operation({"type": "object"})}
    paths["/v1/models"] = {"get": _operation(None)}
    paths["/health"] = {"get": _operation(None)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "chipmesh: OpenAI-compatible HTTP", "version": _version()},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(body: dict[str, Any] | None) -> dict[str, Any]:
    refused = {"description": "refused", "content": {"application/json": {"schema": _ref("Error")}}}
    content: dict[str, Any] = {"application/json": {}, **({"text/event-stream": {}} if body else {})}
    operation: dict[str, Any] = {
        "security": [{"key": []}, {}],
        "responses": {"200": {"description": "served", "content": content}, "default": refused},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _ref(model: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=model)}


def _version() -> str:
    try:
        return version("chipmesh")
    except PackageNotFoundError:
        return "0"
