"""When must a prompt's blocks be reserved, if they shall be there in time and not idle before?

Blocks that are reserved when the ticket comes stay empty for the whole prefill. They are needed when the
owner is nearly done: then what is ready is read at once, and only the last chunk is left to read
after the first token. Too late costs the client a step of this engine, too early only idle blocks: so a
prefill counts as faster than it was measured. Nothing measured yet, or nothing to wait for: reserve now.

    |------------- prefill, as its progress so far lets expect -------------|
    |------------------- DOUBT faster -------------------|
                     |<-- MARGIN_S + READ_FACTOR x read -->|
                     reserve
"""

from __future__ import annotations

from protocol.ports import Clock

MARGIN_S = 0.25
READ_FACTOR = 2.0
DOUBT = 0.25
"""Share of the expected time by which a prefill may be done earlier."""
FADE = 0.75
"""What an observation's weight is multiplied by with each later one."""


class Rate:
    """How much per second, as lately observed; what took longer weighs more."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._spent_s = 0.0

    @property
    def per_s(self) -> float | None:
        """None: nothing was observed yet."""
        return self._amount / self._spent_s if self._spent_s > 0 else None

    def observe(self, amount: float, spent_s: float) -> None:
        if spent_s > 0:  # two reports at the same time say nothing about the speed
            self._amount = self._amount * FADE + amount
            self._spent_s = self._spent_s * FADE + spent_s

    def time_for(self, amount: float) -> float | None:
        """Seconds that so much would take."""
        rate = self.per_s
        return amount / rate if rate else None


class PrefillPace:
    """One prefill's progress, in tokens."""

    def __init__(self, num_tokens: int, tokens_ready: int, rate: Rate, clock: Clock) -> None:
        """`rate`: tokens per second of the owner's prefills, which this one adds to."""
        self._num_tokens = num_tokens
        self._tokens_ready = tokens_ready
        self._rate = rate
        self._clock = clock
        self._progressed_s = clock()
        self._is_measuring = False

    def note(self, tokens_ready: int) -> None:
        """The owner said so now. Its first word tells where it stands, not how fast it got there."""
        if self._is_measuring and tokens_ready <= self._tokens_ready:
            return
        now_s = self._clock()
        if self._is_measuring:
            self._rate.observe(tokens_ready - self._tokens_ready, now_s - self._progressed_s)
        self._is_measuring = True
        self._tokens_ready, self._progressed_s = max(tokens_ready, self._tokens_ready), now_s

    def remaining_s(self) -> float | None:
        """Seconds until the prefill may be complete, as far as its owner was ever measured."""
        whole_s = self._rate.time_for(self._num_tokens - self._tokens_ready)
        if whole_s is None:
            return None
        return max(0.0, whole_s * (1 - DOUBT) - (self._clock() - self._progressed_s))


def reservation_delay_s(remaining_s: float | None, read_s: float | None) -> float:
    """Seconds from now until the blocks are to be reserved; 0: now."""
    if remaining_s is None or read_s is None:
        return 0.0
    return max(0.0, remaining_s - (READ_FACTOR * read_s + MARGIN_S))
