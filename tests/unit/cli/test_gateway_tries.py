"""Which gateway is asked next, how soon, and when it is enough."""

from __future__ import annotations

from meshkit.cli.gateway_tries import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_TRIES, GatewayTries
from meshkit.errors import InvalidArgument, ResourceExhausted, Unavailable

GONE = Unavailable("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_up_to_the_longest_and_end() -> None:
    tries = GatewayTries(["a", "b", "c"], timeout_s=None)
    pauses, asked = [], [tries.gateway]
    while (pause_s := tries.pause_after(GONE, accepted=True)) is not None:
        pauses.append(pause_s)
        asked.append(tries.gateway)
    assert len(pauses) == MOST_TRIES
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    assert asked[:4] == ["a", "b", "c", "a"]


def test_before_it_is_accepted_each_gateway_is_asked_once() -> None:
    tries = GatewayTries(["a", "b"], timeout_s=None)
    assert tries.pause_after(GONE, accepted=False) == 0.0
    assert tries.gateway == "b"
    assert tries.pause_after(GONE, accepted=False) is None
    assert GatewayTries(["a", "b"], timeout_s=None).pause_after(InvalidArgument("no"), accepted=False) is None


def test_no_room_is_waited_for_once_it_was_accepted() -> None:
    full = ResourceExhausted("full", retry_after_s=1.0)
    assert GatewayTries(["a"], timeout_s=None).pause_after(full, accepted=True) == FIRST_PAUSE_S
    assert GatewayTries(["a", "b"], timeout_s=None).pause_after(full, accepted=False) is None


def test_all_tries_share_one_time_limit() -> None:
    clock = Clock()
    tries = GatewayTries(["a"], timeout_s=5.0, clock=clock)
    clock.now += 2.0
    assert tries.time_left_s == 3.0
    clock.now += 9.0
    assert tries.time_left_s == 0.0
    assert GatewayTries(["a"], timeout_s=None).time_left_s is None
