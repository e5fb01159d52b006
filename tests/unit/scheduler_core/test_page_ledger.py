from __future__ import annotations

import pytest

from scheduler_svc.core.page_ledger import PageLedger


def test_pages_are_handed_out_lowest_first_and_each_once() -> None:
    ledger = PageLedger(5)
    first, second = ledger.allocate(2), ledger.allocate(3)
    assert first is not None
    assert second is not None
    assert [*first, *second] == [0, 1, 2, 3, 4]
    assert ledger.free_count == 0


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    ledger = PageLedger(3)
    assert ledger.allocate(4) is None
    assert ledger.free_count == 3


def test_pages_given_back_are_handed_out_again() -> None:
    ledger = PageLedger(3)
    taken = ledger.allocate(3)
    assert taken is not None
    ledger.free([2, 0])
    again = ledger.allocate(2)
    assert again is not None
    assert sorted(again) == [0, 2]


def test_what_was_allocated_does_not_change_when_the_stack_does() -> None:
    ledger = PageLedger(2)
    taken = ledger.allocate(1)
    assert taken is not None
    ledger.free([0])
    ledger.allocate(2)
    ledger.free([1, 0])
    assert taken.tolist() == [0]


def test_more_pages_than_are_out_cannot_come_back() -> None:
    ledger = PageLedger(2)
    ledger.allocate(1)
    with pytest.raises(ValueError, match="2 pages come back, but only 1 are out"):
        ledger.free([0, 1])
