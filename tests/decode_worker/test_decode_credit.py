"""What routers may hand over: free blocks, less what is promised and kept, shared among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.credit import CreditBook
from protocol.ids import SequenceId

A, B, C = (SequenceId(name) for name in "abc")


def book(num_sessions: int = 1, reserve: float = 0.0, largest: int = 1) -> CreditBook:
    credit = CreditBook(reserve, largest)
    credit.num_sessions = num_sessions
    return credit


@pytest.mark.parametrize("num_sessions", [0, 1])
def test_empty_worker_grants_its_whole_pool(num_sessions: int) -> None:
    assert book(num_sessions, reserve=0.5).blocks(3, 100) == 100


@pytest.mark.parametrize(("largest", "each"), [(5, 25), (60, 60), (100, 100)])
def test_routers_share_an_empty_worker_but_for_the_largest_request(largest: int, each: int) -> None:
    assert book(num_sessions=4, largest=largest).blocks(100, 100) == each


@given(st.integers(1, 8), st.integers(1, 200), st.integers(0, 200), st.integers(0, 200))
def test_routers_are_promised_less_than_one_largest_request_each_too_much(
    num_sessions: int, largest: int, promised: int, blocks_free: int
) -> None:
    total = 200
    credit = book(num_sessions, largest=largest)
    if promised:
        credit.accept(A, promised)
    spare = max(0, blocks_free - promised) if promised else total
    excess = num_sessions * credit.blocks(blocks_free, total) - spare
    assert excess <= (num_sessions - 1) * largest
    if spare >= num_sessions * largest:
        assert excess <= 0


def test_promised_blocks_are_not_granted_again_until_they_are_allocated_and_counted() -> None:
    credit = book()
    credit.accept(A, 30)
    assert credit.blocks(100, 100) == 70
    credit.accept(B, 50)
    assert credit.blocks(100, 100) == 20
    credit.allocated(A)
    assert credit.blocks(70, 100) == 20
    credit.allocated(B)
    assert credit.blocks(20, 100) == 20
    credit.end(A)
    assert credit.blocks(50, 100) == 50


def test_request_that_ends_before_it_has_blocks_takes_its_promise_along() -> None:
    credit = book()
    credit.accept(A, 30)
    credit.accept(B, 1)
    credit.end(A)
    credit.end(A)
    credit.allocated(A)
    assert (credit.num_promised_blocks, credit.num_accepted) == (1, 1)
    assert credit.blocks(100, 100) == 99


def test_reserve_is_kept_for_those_that_run() -> None:
    credit = book(reserve=0.05)
    credit.accept(A, 10)
    assert credit.blocks(100, 100) == 85
    assert credit.blocks(12, 100) == 0


def test_routers_share_what_is_left_and_never_owe_anything() -> None:
    credit = book(num_sessions=3)
    credit.accept(A, 10)
    assert credit.blocks(100, 100) == 30
    credit.accept(B, 500)
    assert credit.blocks(100, 100) == 0


def test_the_largest_request_fits_into_any_router_s_share_while_others_keep_the_worker_busy() -> None:
    credit = book(num_sessions=4, largest=60)
    credit.accept(A, 20)
    assert credit.blocks(100, 100) == 60
    credit.accept(B, 30)
    assert credit.blocks(100, 100) == 50
