"""Silence is what a loop that was awake did not hear."""

from __future__ import annotations

import asyncio

import pytest

from rpc.watchdog import LOOKS, Watchdog

LIMIT_S = 8.0


class Heard:
    """A watchdog on a hand-stepped clock, which is looked after by hand, too."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_barks = 0
        self.watchdog = Watchdog(LIMIT_S, self._bark, lambda: self.now_s)

    def _bark(self) -> None:
        self.num_barks += 1

    def look_after(self, seconds: float) -> None:
        self.now_s += seconds
        self.watchdog._look()


@pytest.fixture
async def heard() -> Heard:
    return Heard()


async def test_peer_that_is_silent_for_the_limit_is_told_once(heard: Heard) -> None:
    for _ in range(LOOKS - 1):
        heard.look_after(LIMIT_S / LOOKS)
    assert heard.num_barks == 0
    heard.look_after(LIMIT_S / LOOKS)
    assert heard.num_barks == 1
    assert heard.watchdog.has_barked
    heard.watchdog.stop()


async def test_loop_that_was_held_up_blames_nobody(heard: Heard) -> None:
    heard.look_after(100 * LIMIT_S)
    assert heard.num_barks == 0
    heard.watchdog.stop()


async def test_sign_of_life_starts_the_count_anew(heard: Heard) -> None:
    for _ in range(3 * LOOKS):
        heard.watchdog.feed()
        heard.look_after(LIMIT_S / LOOKS)
    assert heard.num_barks == 0
    heard.watchdog.stop()


async def test_watchdog_barks_by_itself_and_not_after_it_was_stopped() -> None:
    barked = asyncio.Event()
    Watchdog(0.08, barked.set, asyncio.get_running_loop().time)
    stopped = Watchdog(0.08, pytest.fail, asyncio.get_running_loop().time)
    stopped.stop()
    async with asyncio.timeout(5):
        await barked.wait()
