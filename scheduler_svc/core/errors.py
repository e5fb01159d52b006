"""What the core raises. Each is an answer to one caller; none leaves the core half changed."""

from __future__ import annotations

from collections.abc import Iterable


class SchedulerError(Exception):
    """Root of the core's errors."""


class UnknownModel(SchedulerError):
    """No group serves the model."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        self.model = model
        self.known = tuple(sorted(known))
        super().__init__(f"model {model!r} is not served; served are: {', '.join(self.known) or 'none'}")


class UnknownReplica(SchedulerError):
    """No such replica in the mesh."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        super().__init__(f"replica {replica!r} is not in the mesh")


class UnknownPolicy(SchedulerError, ValueError):
    """No schedule policy of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"schedule policy {name!r} is unknown; known are: {', '.join(self.known)}")


class UnknownEvictionPolicy(SchedulerError, ValueError):
    """No eviction policy of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"eviction policy {name!r} is unknown; known are: {', '.join(self.known)}")


class FellBehind(SchedulerError):
    """A reader of KV events asks for events that are no longer kept, or that never were: take a snapshot.

    first_seq: the oldest event kept; last_seq: the newest one there was.
    """

    def __init__(self, *, after_seq: int, first_seq: int, last_seq: int) -> None:
        self.after_seq = after_seq
        self.first_seq = first_seq
        self.last_seq = last_seq
        super().__init__(
            f"KV events after {after_seq} are wanted, but {first_seq} to {last_seq} are kept; "
            "take a snapshot and go on from its number"
        )


class QueueFull(SchedulerError):
    """As much waits as may wait. what: requests or tokens, of which `limit` may wait."""

    def __init__(self, limit: int, *, waiting: int, what: str) -> None:
        self.limit = limit
        self.what = what
        super().__init__(f"{waiting} {what} wait already; {limit} may (max_queued_{what})")


class RequestTooLarge(SchedulerError):
    """A request that could not make even one token, however empty the replica.

    tokens: prompt and output so far; room_tokens: longest sequence that fits, prompt and output together.
    """

    def __init__(self, *, tokens: int, room_tokens: int) -> None:
        self.tokens = tokens
        self.room_tokens = room_tokens
        super().__init__(
            f"the request has {tokens} tokens; the replica has room for {room_tokens} with those still to be "
            f"made, so at most {max(0, room_tokens - 1)} fit. Shorten the prompt"
        )


class CannotConstrain(SchedulerError):
    """A request whose output has to have a given form, and no ready replica of its model can follow one."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(
            f"no replica of model {model!r} can give its output a form, the workers' logs say why; ask "
            "without one"
        )


class StepOutOfOrder(SchedulerError):
    """A result that is not of the oldest step in flight: a duplicate, a stale one, or a gap."""

    def __init__(self, step_seq: int, expected: int | None) -> None:
        self.step_seq = step_seq
        self.expected = expected
        wanted = f"that of step {expected} is next" if expected is not None else "no step is in flight"
        super().__init__(f"a result of step {step_seq} came, but {wanted}")


class ResultContradictsPlan(SchedulerError):
    """A result whose slots are not those that the plan let sample: executor and core have come apart."""


class IdentityViolated(SchedulerError):
    """`free + cached + held == total` does not hold, or a page has two owners or none."""
