"""The constraint of a call: its content's form, its tool calls' form, and the reasoning that goes before."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.models import ModelText, ServedModel
from gateway.openai_http.bodies import ChatBody, FunctionTool, SamplingBody
from gateway.openai_http.call_grammar import ANYTHING, Mark, call_grammar
from gateway.openai_http.constraint_sources import UNSUPPORTED, ContentForm, content_form
from gateway.openai_http.parsing.message import ToolFamily, begins_reasoning, reasons
from gateway.openai_http.parsing.reasoning import CLOSE, OPEN
from gateway.openai_http.translation import offered_tools
from meshkit.constraints.form import GRAMMAR, Constraint
from meshkit.errors import InvalidArgument

Constrain = Callable[[Sequence[int]], Constraint]
"""The constraint of an output, given the prompt's tokens."""
_BLANKS = r"/[ \n]{0,4}/"


@dataclass(frozen=True)
class _Rules:
    """start: Lark's rules below it are `more`."""

    start: str
    more: str = ""


def constrain_completion(body: SamplingBody) -> Constrain | None:
    """Of a call without a conversation."""
    form = content_form(body)
    return None if form is None else lambda _: form.constraint


def constrain_chat(body: ChatBody, model: ServedModel, family: ToolFamily | None) -> Constrain | None:
    """Of a conversation; None where any answer will do. family: how calls are written, where there are tools.

    Raises:
        InvalidArgument: the body contradicts itself, or asks for what there is not; the field is named.
    """
    form = content_form(body)
    calls = _call_rules(body, model, family, form)
    if form is None and calls is None:
        return None
    text = model.text
    thinks = text is not None and reasons(text.template)
    if calls is None and form is not None and not thinks:
        return lambda _: form.constraint
    if form is not None and not form.lark:
        raise InvalidArgument(
            f"{form.field} is a grammar of its own, which goes with neither tools nor a model that reasons; "
            "use a schema or a regular expression, or tool_choice none",
            field=form.field,
            reason=UNSUPPORTED,
        )
    answer = calls or _Rules(form.lark if form is not None else "")
    if text is None or not thinks:
        return lambda _: _grammar(answer)
    return lambda prompt: _grammar(_after_reasoning(answer, text, begun=begins_reasoning(text, prompt)))


def _call_rules(
    body: ChatBody, model: ServedModel, family: ToolFamily | None, form: ContentForm | None
) -> _Rules | None:
    """None where calls are not constrained."""
    tools = [tool.function for tool in offered_tools(body)]
    wanted, is_forced = _choose_tools(body, tools)
    is_strict = any(tool.strict for tool in tools)
    if not (is_forced or is_strict or (form is not None and tools)):
        return None
    if family is None or model.text is None:
        return None
    # A tool that need not keep to its schema, beside others that have to.
    loose = [tool if is_forced or tool.strict else _with_any_arguments(tool) for tool in wanted]
    rules = call_grammar(
        family,
        loose,
        _marks(model.text),
        several=body.parallel_tool_calls is not False,
        named_args=model.text.template.mentions("[ARGS]"),
    )
    if is_forced:
        return _Rules("calls", rules)
    return _Rules("answer" if form is None else f"{form.lark} | calls", rules)


def _with_any_arguments(tool: FunctionTool) -> FunctionTool:
    return tool.model_copy(update={"parameters": None})


def _choose_tools(body: ChatBody, tools: list[FunctionTool]) -> tuple[list[FunctionTool], bool]:
    """The tools that may be called, and whether one has to be.

    Raises:
        InvalidArgument: tool_choice names none of the tools, or has a form that is not known.
    """
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return tools, False
    if choice == "required":
        if not tools:
            raise _bad_choice("is required, and there are no tools; send some")
        return tools, True
    name = _name_of(choice)
    named = [tool for tool in tools if tool.name == name]
    if not named:
        raise _bad_choice(f"names {name[:80]!r}, which is none of the tools")
    return named, True


def _name_of(choice: str | dict[str, Any] | None) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise InvalidArgument(
        f"tool_choice is {json.dumps(choice)[:80]}; none, auto, required and "
        '{"type": "function", "function": {"name": ...}} are supported',
        field="tool_choice",
        reason=UNSUPPORTED,
    )


def _bad_choice(what: str) -> InvalidArgument:
    return InvalidArgument(f"tool_choice {what}", field="tool_choice")


def _marks(text: ModelText) -> Mark:
    def mark(written: str) -> str:
        token_id = text.tokenizer.id_of(written)
        if token_id is not None and text.tokenizer.is_special(token_id):
            return f"<[{token_id}]>"
        return json.dumps(written, ensure_ascii=False)

    return mark


def _after_reasoning(answer: _Rules, text: ModelText, *, begun: bool) -> _Rules:
    """A block of reasoning before the answer, which the prompt may have begun; else the model need not."""
    mark = _marks(text)
    closing = mark(CLOSE)
    inner = f"{ANYTHING} {closing}"
    block = f"block: {inner}" if closing.startswith("<[") else f"block[lazy]: {inner}"
    before = f"block {_BLANKS}" if begun else f"({mark(OPEN)} block {_BLANKS})?"
    return replace(answer, start=f"{before} ({answer.start})", more=f"{block}\n{answer.more}")


def _grammar(rules: _Rules) -> Constraint:
    return Constraint(GRAMMAR, f"start: {rules.start}\n{rules.more}")
