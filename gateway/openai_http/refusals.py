"""What the mesh cannot do, refused by name: a field that would change the output is never ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.openai_http.bodies import ChatBody, CompletionBody, SamplingBody
from meshkit.errors import InvalidArgument

UNSUPPORTED = "UNSUPPORTED_VALUE"

# Field -> (values that ask for nothing, why not more).
REFUSED_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this mesh serves text"),
    "modalities": ((["text"],), "this mesh serves text"),
    "functions": (([],), "it was replaced by tools; send those"),
    "function_call": (("none",), "it was replaced by tool_choice; send tools"),
    "web_search_options": ((), "the mesh searches nothing"),
    "echo": ((False,), "the output begins after the prompt"),
    "suffix": (("",), "no served model fills in the middle"),
    "use_beam_search": ((False,), "there is no beam search; sample n choices"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "prompt_logprobs": ((0, False), "log-probabilities are of the output only"),
    "bad_words": (([],), "send logit_bias of -100 for their tokens"),
    "allowed_token_ids": (([],), "send logit_bias"),
    "continue_final_message": ((False,), "send the rendered text to /v1/completions"),
    "add_generation_prompt": ((True,), "send the rendered text to /v1/completions"),
    "documents": (([],), "put them into a message"),
    "chat_template": ((), "the model's own template is used: a template is a program"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "skip_special_tokens": ((True,), "markup is never part of the text; ask for return_token_ids"),
    "include_stop_str_in_output": ((False,), "a stop string is not part of the text"),
    "no_stop_trim": ((False,), "a stop string is not part of the text"),
    "lora_path": ((), "there are no adapters"),
    "structural_tag": ((), "send tools, or a grammar"),
    "guided_whitespace_pattern": ((), "send x-guidance within the schema"),
}


def refuse_unsupported(body: SamplingBody) -> None:
    """Raises InvalidArgument (UNSUPPORTED_VALUE) for the first field that asks for what there is not."""
    for field, why in _unsupported(body):
        raise InvalidArgument(f"{field} {why}", field=field, reason=UNSUPPORTED)


def _unsupported(body: SamplingBody) -> Iterator[tuple[str, str]]:
    for field, value in (body.model_extra or {}).items():
        harmless, why = REFUSED_FIELDS.get(field, ((), ""))
        if why and value is not None and value not in harmless:
            yield field, f"is not supported: {why}; leave it out"
    if isinstance(body, ChatBody):
        yield from _unsupported_in_chat(body)
    if isinstance(body, CompletionBody):
        yield from _unsupported_in_completion(body)


def _unsupported_in_chat(body: ChatBody) -> Iterator[tuple[str, str]]:
    if body.top_logprobs:
        yield (
            "top_logprobs",
            f"is {body.top_logprobs}; only the chosen token's log-probability is offered: send 0",
        )


def _unsupported_in_completion(body: CompletionBody) -> Iterator[tuple[str, str]]:
    if body.logprobs:
        yield "logprobs", f"is {body.logprobs}; only the chosen token's log-probability is offered: send 0"
    if body.best_of is not None and body.best_of != body.choice_count:
        yield (
            "best_of",
            f"is {body.best_of} and n is {body.choice_count}; choices are not ranked: let them be equal",
        )
