"""The model's own template, and templates and messages that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from gateway.text import ChatTemplate, Tokenizer
from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder

HELLO = [{"role": "user", "content": "Hello"}]
MakeTemplate = Callable[..., ChatTemplate]


@pytest.fixture
def with_template(smollm2: ModelFolder) -> MakeTemplate:
    def make(source: Any, **limits: Any) -> ChatTemplate:
        config = {**smollm2.tokenizer_config, "chat_template": source}
        return ChatTemplate(replace(smollm2, tokenizer_config=config), **limits)

    return make


def refusal(template: ChatTemplate, messages: list[dict[str, Any]]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        template.render(messages)
    assert caught.value.field == "chat"
    return caught.value


def test_the_real_template_puts_its_system_message_first_and_opens_the_assistants_turn(
    smollm2: ModelFolder, tokenizer: Tokenizer
) -> None:
    prompt = ChatTemplate(smollm2).render(HELLO)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_a_system_message_replaces_the_templates_own(smollm2: ModelFolder) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    prompt = ChatTemplate(smollm2).render(messages, add_generation_prompt=False)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "CHAT_SIZE"),
        (HELLO * 5000, "CHAT_SIZE"),
        ([{"role": "wizard", "content": "x"}], "CHAT_ROLE_UNKNOWN"),
        ([{"role": "user"}], "CHAT_CONTENT"),
        ([{"role": "user", "content": ["x"]}], "CHAT_CONTENT"),
        ([{"role": "user", "content": "x" * 16_000_001}], "CHAT_SIZE"),
    ],
)
def test_bad_messages_are_errors_of_chat(
    smollm2: ModelFolder, messages: list[dict[str, Any]], reason: str
) -> None:
    assert refusal(ChatTemplate(smollm2), messages).reason == reason


def test_what_the_template_refuses_is_told_in_its_words(with_template: MakeTemplate) -> None:
    template = with_template("{{ raise_exception('roles must alternate') }}")
    error = refusal(template, HELLO)
    assert error.reason == "CHAT_REFUSED"
    assert "roles must alternate" in error.message


def test_a_model_without_a_template_says_so(with_template: MakeTemplate) -> None:
    template = with_template(None)
    assert refusal(template, HELLO).reason == "CHAT_TEMPLATE_MISSING"


def test_a_template_that_does_not_compile_is_an_error_of_model_path(with_template: MakeTemplate) -> None:
    with pytest.raises(InvalidArgument) as caught:
        with_template("{% for %}")
    assert caught.value.field == "model_path"


def test_the_usual_helpers_are_there(with_template: MakeTemplate) -> None:
    source = (
        "{{ bos_token }}|{{ strftime_now('%d %b %Y') }}|{{ {'a': '<é>'} | tojson }}|"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}|"
        "{% generation %}kept{% endgeneration %}"
    )
    template = with_template(source, now=lambda: datetime(2026, 2, 3, tzinfo=timezone.utc))
    assert template.render(HELLO * 2) == '<|im_start|>|03 Feb 2026|{"a": "<é>"}|Hello|kept'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reaches_neither_python_nor_its_input(with_template: MakeTemplate, source: str) -> None:
    assert refusal(with_template(source), HELLO).reason == "CHAT_NOT_RENDERED"


@pytest.mark.parametrize(
    "source",
    [
        # No output, no call: only the look at the clock in each iteration ends it.
        (
            "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}"
            "{% endfor %}{% endfor %}{% endfor %}{% endfor %}"
        ),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = b %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_runs_for_ever_is_ended(with_template: MakeTemplate, source: str) -> None:
    error = refusal(with_template(source, time_limit_s=0.05), HELLO * 300)
    assert "ran for over" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000000 }}",
        "{{ 100000000000 * 'x' }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set n = namespace(x='y') %}{% for i in range(90) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_makes_too_much_is_ended(with_template: MakeTemplate, source: str) -> None:
    assert refusal(with_template(source, max_chars=1_000_000), HELLO).reason == "CHAT_NOT_RENDERED"


def test_a_message_shape_that_the_template_does_not_expect_is_an_error_of_chat(
    with_template: MakeTemplate,
) -> None:
    assert refusal(with_template("{{ messages[0]['name']['x'] }}"), HELLO).reason == "CHAT_NOT_RENDERED"
