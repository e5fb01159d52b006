"""Chat messages to the prompt text that the model was trained on, through the model's own template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from jinja2 import Template, TemplateError

from gateway.text.template_sandbox import MessageRefusedError, TemplateSandbox, render_bounded
from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder

KNOWN_ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class ChatTemplate:
    """One model's chat template, compiled once; safe to render from several threads at once.

    max_chars bounds the template's source, the messages' text in all, and the prompt that comes out;
    max_messages their number; time_limit_s one rendering. template_sandbox.py says how far Jinja lets these
    bounds go.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        max_messages: int = 4096,
        max_chars: int = 16_000_000,
        time_limit_s: float = 5.0,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """Compile the folder's template. A model without one is fine until `render` is called.

        Raises:
            InvalidArgument: (model_path) the template is no Jinja template, or too long.
        """
        self._model_name = folder.name
        self._max_messages = max_messages
        self._max_chars = max_chars
        self._time_limit_s = time_limit_s
        self._sandbox = TemplateSandbox(max_value_chars=max_chars, now=now)
        self._variables = {name: folder.tokenizer_config.get(name) or "" for name in _TOKEN_VARIABLES}
        source = folder.tokenizer_config.get("chat_template")
        self._template = None if source is None else self._compile(source)
        self._source = source or ""
        self._takes_tools = source is not None and self._sandbox.reads_variable(source, "tools")

    def __repr__(self) -> str:
        return f"<ChatTemplate model={self._model_name!r} present={self._template is not None}>"

    def mentions(self, text: str) -> bool:
        """Whether `text` stands in the template's source: what markup the model was trained on."""
        return text in self._source

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows `tools` to the model; another one would drop them silently."""
        return self._takes_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, each with `role` (one of KNOWN_ROLES) and `content` (text).

        add_generation_prompt: end with the opening of the assistant's turn. Encode the result with
        `add_special_tokens=False`: the template has written them already.
        tools: as OpenAI's schema has them. variables: further ones that the template knows; ours go before.

        Raises:
            InvalidArgument: (chat) no template, no messages, an unknown role, content that is no text, or
            what the
                template refuses or cannot render within the limits.
        """
        if self._template is None:
            raise _chat_error(
                f"model {self._model_name!r} has no chat template; send plain text instead",
                reason="CHAT_TEMPLATE_MISSING",
            )
        self._check(messages)
        everything = {
            **(variables or {}),
            **self._variables,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render(self._template, everything)

    def _render(self, template: Template, variables: dict[str, Any]) -> str:
        try:
            return render_bounded(
                template, variables, time_limit_s=self._time_limit_s, max_output_chars=self._max_chars
            )
        except MessageRefusedError as error:
            raise _chat_error(
                f"the model's template refuses it: {error.message}", reason="CHAT_REFUSED"
            ) from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            # What a template may raise on messages of a shape that it does not expect.
            raise _chat_error(
                f"the model's template cannot render it: {type(error).__name__}: {error}",
                reason="CHAT_NOT_RENDERED",
            ) from error

    def _compile(self, source: object) -> Template:
        if not isinstance(source, str) or len(source) > self._max_chars:
            raise InvalidArgument(
                f"model_path: the chat template of {self._model_name!r} is no text of at most "
                f"{self._max_chars} characters",
                field="model_path",
                reason="CHAT_TEMPLATE_DAMAGED",
            )
        try:
            return self._sandbox.compile_bounded(source)
        except (TemplateError, RecursionError) as error:
            raise InvalidArgument(
                f"model_path: the chat template of {self._model_name!r} does not compile: {error}",
                field="model_path",
                reason="CHAT_TEMPLATE_DAMAGED",
            ) from error

    def _check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if not 0 < len(messages) <= self._max_messages:
            raise _chat_error(
                f"has {len(messages)} messages; from 1 to {self._max_messages} are allowed",
                reason="CHAT_SIZE",
            )
        size_chars = 0
        for position, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in KNOWN_ROLES:
                raise _chat_error(
                    f"message {position} has role {role!r}; known are {', '.join(KNOWN_ROLES)}",
                    reason="CHAT_ROLE_UNKNOWN",
                )
            if not isinstance(content, str):
                raise _chat_error(f"message {position} has no text as content", reason="CHAT_CONTENT")
            size_chars += len(content)
        if size_chars > self._max_chars:
            raise _chat_error(
                f"has {size_chars} characters; at most {self._max_chars} are allowed", reason="CHAT_SIZE"
            )


def _chat_error(message: str, *, reason: str) -> InvalidArgument:
    return InvalidArgument(f"chat: {message}", field="chat", reason=reason)
