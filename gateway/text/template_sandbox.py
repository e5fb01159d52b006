"""A Jinja environment in which a template can neither reach Python nor run for long.

How far the bounds go: every loop iteration and every call looks at a deadline; what is printed is counted as
it comes; the operators that can make one huge value (`*`, `**`, `+`) are checked on their operands. Not
bounded is memory that a single filter or format takes (`"%999999999d" % 1`): Jinja gives no hook there. So
templates come from the model's folder, which the operator chose, and never from a client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TICK = "_chipmesh_tick"


class TemplateBoundError(TemplateError):
    """A template took too long or made too much."""


class MessageRefusedError(TemplateError):
    """The template itself refused the messages, with `raise_exception`."""


class _GenerationExtension(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's part for training: its body is
    kept.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates; one instance serves one rendering at a time per `BoundedRun`."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self, *, max_value_chars: int, now: Callable[[], datetime]) -> None:
        """`max_value_chars` bounds one value made by an operator; `now` is what strftime_now shows."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationExtension]
        )
        self._max_value_chars = max_value_chars
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def compile_bounded(self, source: str) -> Template:
        """Compile `source` with a look at the deadline in each loop iteration; raises
        jinja2.TemplateError.
        """
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            tick = nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None))
            loop.body.insert(0, tick.set_lineno(loop.lineno).set_environment(self))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def reads_variable(self, source: str, name: str) -> bool:
        """Whether the template uses a variable of the caller's called `name`."""
        return name in meta.find_undeclared_variables(self.parse(source))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here, recursive macros' too."""
        context[_TICK]()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _size(left) + _size(right) > self._max_value_chars:
            raise TemplateBoundError(f"'+' would make a value of over {self._max_value_chars} characters")
        if operator == "*" and self._product_too_large(left, right):
            raise TemplateBoundError(f"'*' would make a value of over {self._max_value_chars} characters")
        if operator == "**" and (_magnitude(left) > 1_000_000 or _magnitude(right) > 64):
            raise TemplateBoundError("'**' takes numbers up to 1000000 and exponents up to 64")
        return super().call_binop(context, operator, left, right)

    def _product_too_large(self, left: Any, right: Any) -> bool:
        if isinstance(left, int) and isinstance(right, int):
            return left.bit_length() + right.bit_length() > self._max_value_chars
        for sequence, count in ((left, right), (right, left)):
            if isinstance(count, int) and _size(sequence) * count > self._max_value_chars:
                return True
        return False


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _magnitude(value: Any) -> float:
    return abs(value) if isinstance(value, (int, float)) else 0


def render_bounded(
    template: Template, variables: dict[str, Any], *, time_limit_s: float, max_output_chars: int
) -> str:
    """Render within the limits.

    Raises:
        TemplateBoundError: over a limit. MessageRefusedError: by the template's own raise_exception.
        jinja2.TemplateError, or what an operation on wrong types raises: whatever else goes wrong inside.
    """
    deadline = time.monotonic() + time_limit_s

    def tick() -> None:
        if time.monotonic() > deadline:
            raise TemplateBoundError(f"it ran for over {time_limit_s} s")

    pieces: list[str] = []
    size = 0
    for piece in template.generate({**variables, _TICK: tick}):
        tick()
        size += len(piece)
        if size > max_output_chars:
            raise TemplateBoundError(f"its output has over {max_output_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise MessageRefusedError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which a model should not read."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
