"""An interceptor's wrapped handlers: one for each method, made once."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest

from meshkit.rpc.handlers import Around, Context, Handler, Proceed, WrappedHandlers


async def echo(request: Any, context: Context) -> Any:
    return request


def handler() -> Handler:
    return grpc.unary_unary_rpc_method_handler(echo)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def handlers(told: list[str]) -> WrappedHandlers:
    def around_of(method: str) -> Around:
        async def around(context: Context, proceed: Proceed) -> object:
            told.append(method)
            return await proceed()

        return around

    return WrappedHandlers(around_of)


async def test_a_method_is_wrapped_once_and_keeps_its_own_name(
    handlers: WrappedHandlers, told: list[str]
) -> None:
    one, other = handler(), handler()
    first = handlers.wrap(one, "/s/One")
    assert handlers.wrap(one, "/s/One") is first
    second = handlers.wrap(other, "/s/Other")
    assert second is not first
    for wrapped in (first, second, first):
        answer = cast(Any, wrapped).unary_unary
        assert await answer(b"text", None) == b"text"
    assert told == ["/s/One", "/s/Other", "/s/One"]


def test_a_handler_that_comes_in_anothers_place_is_wrapped_itself(handlers: WrappedHandlers) -> None:
    async def answer(request: Any, context: Context) -> Any:
        return b"answer"

    first = handlers.wrap(handler(), "/s/One")
    second = handlers.wrap(grpc.unary_unary_rpc_method_handler(answer), "/s/One")
    assert second is not first
