"""From the bytes of a body to its checked model; what is wrong is named by the field's path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from gateway.openai_http.bodies import SamplingBody
from gateway.openai_http.refusals import refuse_unsupported
from meshkit.errors import InvalidArgument

B = TypeVar("B", bound=SamplingBody)
MOST_SHOWN_CHARS = 80


def read_body(kind: type[B], content: bytes) -> B:
    """The checked body. Takes about 20 ms for a prompt of a million token ids.

    Raises:
        InvalidArgument: it is no JSON object, a field is wrong, or asks for what the mesh cannot do.
    """
    raw = _parse(content)
    try:
        body = kind.model_validate(raw)
    except ValidationError as error:
        raise _first_problem(error, raw) from None
    refuse_unsupported(body)
    return body


def _parse(content: bytes) -> dict[str, Any]:
    try:
        raw = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON: {error}", reason="BODY_NOT_JSON") from None
    if not isinstance(raw, dict):
        raise InvalidArgument("the body is no JSON object", reason="BODY_NOT_JSON")
    return raw


def _first_problem(error: ValidationError, raw: dict[str, Any]) -> InvalidArgument:
    """Of a union's many complaints, the one that got furthest into the body."""
    problems = [
        (_path_of(each["loc"], raw, missing=each["type"] == "missing"), each) for each in error.errors()
    ]
    path, problem = max(problems, key=lambda each: len(each[0]))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    words = problem["msg"].removeprefix("Value error, ")
    return InvalidArgument(f"{field}: {words[:1].lower()}{words[1:]}{_given(problem['input'])}", field=field)


def _given(value: object) -> str:
    """The value at fault, where it is a short one."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else ""
    return f"; it is {text}" if 0 < len(text) <= MOST_SHOWN_CHARS else ""


def _path_of(location: Sequence[int | str], raw: Any, *, missing: bool) -> list[int | str]:
    """The parts of pydantic's location that are places in the body: it also names branches of unions."""
    path: list[int | str] = []
    place: Any = raw
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if _holds(place, part):
            place = place[part]
        elif not (is_last and missing):
            continue
        path.append(part)
    return path


def _holds(place: Any, part: int | str) -> bool:
    if isinstance(place, dict):
        return part in place
    return isinstance(place, list) and isinstance(part, int) and part < len(place)
