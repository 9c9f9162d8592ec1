"""An event loop whose time passes only when there is nothing else to do.

A test sleeps for minutes of the loop's time in no time at all, and always meets the same order of
events. It must not wait for threads or sockets: the loop does not see them coming.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

FAR_PAST_S = 10_000.0
"""Where a loop's time starts; not 0, so that nobody can rely on it."""


class _JumpingSelector(selectors.SelectSelector):
    """Does not wait: it moves the time on to where the loop would have woken up."""

    now_s = FAR_PAST_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError(
                    "nothing will ever happen again: the test waits for an event nobody sends"
                )
            self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time` is the clock to inject."""

    def __init__(self) -> None:
        self._jumps = _JumpingSelector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a loop of its own in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def settle() -> None:
    """Let everything happen that is due now, without letting time pass."""
    for _ in range(20):
        await asyncio.sleep(0)
