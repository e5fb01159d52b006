"""What the client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshkit.errors import MeshError
from meshkit.load.targets import Received, Usage

NOT_SENT = "PREVIOUS_TURN_FAILED"
"""Error of a turn that was never sent, since the one before it failed."""


@dataclass(slots=True)
class Sample:
    """Seconds are of the driver's clock.

    known_prompt_tokens: length of a prompt that was given by token ids.
    due_s: when an open loop meant to send it. sent_cpu_s, ended_cpu_s: processor time of this process.
    times_s, counts: receipt and tokens of each message that carried tokens; None where that is unknown.
    token_ids: of the output; None once a message came without ids.
    error: code, or code/reason; None where the request ended well.
    """

    max_tokens: int
    known_prompt_tokens: int | None = None
    due_s: float | None = None
    sent_s: float = 0.0
    ended_s: float = 0.0
    sent_cpu_s: float = 0.0
    ended_cpu_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    counts: list[int | None] = field(default_factory=list)
    token_ids: list[int] | None = field(default_factory=list)
    text: str = ""
    usage: Usage | None = None
    error: str | None = None
    error_message: str = ""

    def take(self, received: Received, now_s: float) -> None:
        """Keep one message that came at `now_s`."""
        if received.usage is not None:
            self.usage = received.usage
        self.text += received.text
        if received.tokens == 0:
            return
        self.times_s.append(now_s)
        self.counts.append(received.tokens)
        if received.token_ids is None:
            self.token_ids = None
        elif self.token_ids is not None:
            self.token_ids += received.token_ids

    def fail(self, error: MeshError) -> None:
        """The request ended with `error`."""
        code = error.code.name
        self.error = code if error.reason == code else f"{code}/{error.reason}"
        self.error_message = error.message

    @property
    def counts_are_known(self) -> bool:
        """Whether each message's tokens are: said by the server, or one each as its usage shows."""
        if None not in self.counts:
            return True
        return self.usage is not None and self.usage.completion_tokens == len(self.counts)

    @property
    def output_tokens(self) -> int:
        """As counted; where a message of unknown size is among them, as usage says, else one for each."""
        if self.usage is not None and (None in self.counts or not self.counts):
            return self.usage.completion_tokens
        return sum(1 if count is None else count for count in self.counts)

    @property
    def prompt_tokens(self) -> int | None:
        """As the server's usage says, else as sent; None where nobody knows."""
        return self.usage.prompt_tokens if self.usage is not None else self.known_prompt_tokens

    @property
    def ttft_s(self) -> float | None:
        """Sent to first token received; None where none came."""
        return self.times_s[0] - self.sent_s if self.times_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (tokens - 1); None below two tokens."""
        if self.output_tokens < 2 or not self.times_s:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Sent to the end of the stream."""
        return self.ended_s - self.sent_s
