"""JSON in a model's output: where a value ends, and whether it is a tool call."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from gateway.openai_http.parsing.pieces import ToolCall

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class JsonText:
    """Collects one JSON object or array, and knows where it ends without reading it again."""

    def __init__(self) -> None:
        self.text = ""
        self._place = 0
        self._depth = 0
        self._in_string = False

    def feed(self, text: str) -> str | None:
        """What follows the value, which is then whole in `text`; None while it goes on."""
        self.text += text
        while (
            found := (_IN_STRING if self._in_string else _OUTSIDE).search(self.text, self._place)
        ) is not None:
            self._place = found.end()
            mark = found.group()
            if mark == "\\":
                if self._place == len(self.text):
                    self._place -= 1  # What it escapes is yet to come.
                    return None
                self._place += 1
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    rest, self.text = self.text[self._place :], self.text[: self._place]
                    return rest
        self._place = len(self.text)
        return None


def read_json(text: str) -> Any:
    """The value that `text` is; None where it is none, or one that cannot be written again."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def read_call(value: Any) -> ToolCall | None:
    """The call that a JSON value is: `name`, and `arguments` or `parameters`; None for everything else."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
