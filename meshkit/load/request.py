"""One request of a workload, before it takes a protocol's form, and how a conversation goes on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshkit.errors import FailedPrecondition, InvalidArgument


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation. role: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class LoadRequest:
    """A prompt in one of three forms, and how many tokens to ask for.

    token_ids, text, messages: exactly one is set, and not empty.
    max_tokens: output tokens, at least 1.
    at_s: seconds after the start of the run at which it is due; None: whenever there is room (closed loop).
    session: requests of one session run one after another, in the order of their list. Each but the first
        holds only what is new: the driver puts the conversation so far, answers included, before it.

    Raises:
        InvalidArgument: names the field at fault.
    """

    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[ChatTurn, ...] | None = None
    at_s: float | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        forms = [form for form in (self.token_ids, self.text, self.messages) if form is not None]
        if len(forms) != 1 or not forms[0]:
            raise InvalidArgument(
                "prompt: exactly one of token_ids, text and messages must be set, and not be empty",
                field="prompt",
            )
        if self.max_tokens < 1:
            raise InvalidArgument(
                f"max_tokens is {self.max_tokens}; at least 1 is needed", field="max_tokens"
            )
        if self.at_s is not None and not (math.isfinite(self.at_s) and self.at_s >= 0):
            raise InvalidArgument(
                f"at_s is {self.at_s}; a finite number of seconds from 0 on is allowed", field="at_s"
            )


def continue_conversation(
    before: LoadRequest, *, answer_ids: Sequence[int] | None, answer_text: str, then: LoadRequest
) -> LoadRequest:
    """`then` after `before` and its answer. All of a session must have one form.

    Raises:
        FailedPrecondition: prompts are token ids, and the server told no ids of its answer.
        InvalidArgument: two forms in one session.
    """
    if before.token_ids is not None and then.token_ids is not None:
        if answer_ids is None:
            raise FailedPrecondition(
                "a conversation by token ids needs the ids of each answer, and the server sends text only; "
                "measure it over gRPC or as chat with text (--tokenizer), or have it send ids (vLLM: "
                "--extra-body '{\"return_token_ids\": true}')",
                reason="NO_TOKEN_IDS",
            )
        return dataclasses.replace(then, token_ids=(*before.token_ids, *answer_ids, *then.token_ids))
    if before.text is not None and then.text is not None:
        return dataclasses.replace(then, text=before.text + answer_text + then.text)
    if before.messages is not None and then.messages is not None:
        answer = ChatTurn("assistant", answer_text)
        return dataclasses.replace(then, messages=(*before.messages, answer, *then.messages))
    raise InvalidArgument(
        f"session {then.session!r} has prompts of two forms; let all be token_ids, text or messages",
        field="session",
    )
