"""What clients with a key may read of an error, and that every reason was thought about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway
from gateway.public_errors import PASSING, REWORDED, public_error
from meshkit.errors import Aborted, Internal, InvalidArgument, MeshError, ResourceExhausted, Unavailable

INSIDE = "RuntimeError at 10.0.0.7:5001, /srv/models/m, pid 4711"

ONLY_AT_START = {
    "TOKENIZER_DAMAGED",
    "CHAT_TEMPLATE_DAMAGED",
    "TOKENIZER_UNSUPPORTED",
    "LISTENER_WITHOUT_KEYS",
}
"""Reasons of errors that end a gateway's start, which no client sees."""


def _reasons_of_the_gateway() -> Iterator[str]:
    for file in sorted(Path(gateway.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "reason"
                and isinstance(node.value, ast.Constant)
            ):
                assert isinstance(node.value.value, str)
                yield node.value.value


def test_every_reason_of_the_gateway_passes_or_has_other_words() -> None:
    reasons = set(_reasons_of_the_gateway())
    assert len(reasons) > 20
    assert reasons <= PASSING | REWORDED.keys() | ONLY_AT_START


def test_nothing_passes_and_has_other_words() -> None:
    assert not PASSING & REWORDED.keys()
    assert not PASSING & ONLY_AT_START


def test_an_error_about_the_request_passes_as_it_is() -> None:
    error = InvalidArgument("sampling.top_p is 7", field="sampling.top_p")
    assert public_error(error) is error


@pytest.mark.parametrize(
    "error",
    [
        Internal(INSIDE, reason="NON_FINITE_LOGITS", address="10.0.0.7:5001"),
        Internal(INSIDE), Unavailable(INSIDE),
        Aborted(INSIDE, reason="SOMETHING_NEW", field="executor.listen"),
        InvalidArgument(INSIDE, reason="SOMETHING_NEW"), InvalidArgument(INSIDE, reason="CHAT_NOT_RENDERED"),
        Internal(INSIDE, reason="POISONED"), ResourceExhausted(INSIDE, retry_after_s=2.0),
        ResourceExhausted(INSIDE, reason="OUT_OF_MEMORY", retry_after_s=2.0),
    ],
)  # fmt: skip
def test_the_inside_stays_inside_and_code_reason_and_delay_stay(error: MeshError) -> None:
    public = public_error(error)
    assert (public.code, public.reason) == (error.code, error.reason)
    assert getattr(public, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    told = f"{public.message} {public.field} {public.metadata}"
    for part in ("RuntimeError", "10.0.0.7", "/srv", "4711", "executor"):
        assert part not in told
    assert f"(id {public.metadata['error_id']})" in public.message
