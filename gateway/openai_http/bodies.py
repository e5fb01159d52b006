"""Bodies of requests as pydantic models: OpenAI's fields, and those that vLLM and SGLang add."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
MAX_CHOICES = 128
"""Of one call, over all its prompts."""
MAX_PROMPTS = 128
MAX_TOOLS = 128


class Body(BaseModel):
    """Fields that are not known are ignored, as OpenAI's clients send many; those that would change the
    output are refused by name (`refusals.py`).
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class StreamOptions(Body):
    """include_usage: a last chunk with usage and no choices. continuous_usage_stats: usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Body):
    """A form of the output as vLLM has it; one of these at most."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, populate_by_name=True)

    json_value: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingBody(Body):
    """What both kinds of completions share.

    top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids, return_token_ids: as vLLM and
    SGLang have them. priority: as SGLang has it, greater goes first. guided_*, structured_outputs: as vLLM
    has them; json_schema, regex, ebnf: as SGLang; one of them at most.
    """

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=UINT32_MAX)]] | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    min_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    user: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    is_chat: ClassVar[bool]

    @property
    def choice_count(self) -> int:
        """n, or its default."""
        return self.n or 1


class TextPart(Body):
    """The only kind of content that the mesh takes."""

    type: str
    text: str | None = None


class CalledFunction(Body):
    """arguments: a JSON object as text."""

    name: str = Field(min_length=1)
    arguments: str


class AssistantCall(Body):
    """One call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn. content may be missing only where an assistant called tools.

    reasoning_content: of an earlier answer, for templates that show it again.
    """

    role: str
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(Body):
    """A function that the model may call. parameters: a JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """The only kind of tool is a function."""

    type: Literal["function"]
    function: FunctionTool


class JsonSchemaFormat(Body):
    """schema_: a JSON schema, which the answer keeps to whether strict says so or not."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """type: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    is_chat: ClassVar[bool] = True

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


PromptValue: TypeAlias = "str | array[int]"
"""One prompt: text, or token ids as unsigned integers of four bytes."""


def read_prompts(value: object) -> list[PromptValue]:
    """A prompt in any of its four forms, as a list of prompts.

    Written by hand, since a list of a million ids is looked at once here, at the speed of C.

    Raises:
        ValueError: it has none of the forms.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("is neither text, nor a list of texts, nor token ids, nor a list of such lists")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if kinds == {str}:
        return list(value)
    if kinds == {list}:
        return [_token_ids(each) for each in value]
    raise ValueError("mixes kinds; it is text, a list of texts, token ids, or a list of lists of token ids")


def _token_ids(value: list[Any]) -> PromptValue:
    if value and set(map(type, value)) != {int}:
        raise ValueError("holds what is no token id in a list of them")
    try:
        return array("I", value)
    except OverflowError as error:
        raise ValueError(f"holds a token id outside of 0 to {UINT32_MAX}") from error


_PROMPT_SCHEMA: Mapping[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": UINT32_MAX}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": UINT32_MAX}},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


class CompletionBody(SamplingBody):
    """POST /v1/completions. max_tokens: OpenAI's default is 16 here."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    is_chat: ClassVar[bool] = False

    prompt: Annotated[
        Any, BeforeValidator(read_prompts), PlainSerializer(list), WithJsonSchema(dict(_PROMPT_SCHEMA))
    ]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
