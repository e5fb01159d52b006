from __future__ import annotations

import pytest

from scheduler_svc.core.seat import Ticket
from scheduler_svc.core.token_key import TOKEN_BYTES, key_tokens, token_key
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request, oracle


@pytest.mark.parametrize("output", [[], [7], [7, 8, 9]])
def test_the_rest_of_a_key_is_what_is_left_of_the_whole_one(output: list[int]) -> None:
    ticket = Ticket.of(make_request([1, 2, 3], 9, output=output), budget=9)
    whole = token_key([1, 2, 3, *output])
    assert ticket.key == whole
    for start in range(0, len(whole) + 1, TOKEN_BYTES):
        assert ticket.key_after(start) == whole[start:]


def test_the_tokens_of_a_key_are_those_it_was_made_of() -> None:
    tokens = [0, 5, 2**32 - 1, 7]
    assert key_tokens(token_key(tokens), 1, 3) == tokens[1:3]


def test_what_is_cached_of_a_resumed_request_can_be_found_again() -> None:
    drive = Drive(make_limits(page_size=2, chunk_tokens=4))
    done = oracle(range(5), 9)
    drive.add(make_request(range(5), 20, output=done))
    drive.finish()
    whole = [*range(5), *oracle(range(5), 20)]
    assert drive.batcher.matched_tokens(make_request(whole)) == 24
