"""What a server looks like to the load driver: one request in, messages out as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshkit.errors import InvalidArgument
from meshkit.load.request import LoadRequest


@dataclass(frozen=True)
class Usage:
    """What the server says a request came to, in tokens. cached_tokens: None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Received(NamedTuple):
    """One message of a stream. A plain tuple, since a run has hundreds of thousands.

    tokens: how many it carries; None: it carries some, and the server does not say how many.
    token_ids: their ids; None where the server sends text only.
    """

    tokens: int | None
    token_ids: tuple[int, ...] | None
    text: str
    usage: Usage | None


@dataclass(frozen=True)
class ServedModel:
    """What a server says of a model. vocab_size: number of token ids; None where it does not say."""

    name: str
    vocab_size: int | None = None


class Target(Protocol):
    """A server under load."""

    async def choose_model(self) -> ServedModel:
        """Finds the model of the target's name, or the only one, and sends requests to it from now on.

        Raises:
            MeshError: there is no such model, or several; or the server cannot be asked.
        """
        ...

    def stream(self, request: LoadRequest) -> AsyncGenerator[Received, None]:
        """The messages of one generation. The caller stamps them; closing the generator ends the request.

        Raises:
            MeshError: the request failed, or its stream ended before its end.
        """
        ...


def choose_model(models: Sequence[ServedModel], *, name: str, server: str) -> ServedModel:
    """The model of that name, or the only one where `name` is empty.

    Raises:
        InvalidArgument: none or several.
    """
    found = [model for model in models if name in ("", model.name)]
    if len(found) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise InvalidArgument(
            f"--model is {name!r}; served at {server}: {names}; name one of them", field="--model"
        )
    return found[0]
