"""Do the nodes' clocks agree? Nothing here compares them; logs are easier to read when they do."""

from __future__ import annotations

import time

from cluster.doctor.facts import Clock, Seen
from cluster.doctor.findings import Findings, Topic

CHECK = "clock"
MUCH_S = 1.0


def probe_clock() -> Clock:
    return Clock(time.time())


def seen_from(clock: Clock, asked_at_s: float, answered_at_s: float) -> Clock:
    """The same with its skew, as the wall clock of the machine that asked tells it."""
    middle_s = (asked_at_s + answered_at_s) / 2
    return Clock(clock.unix_s, clock.unix_s - middle_s, answered_at_s - asked_at_s)


def check_clocks(seen: Seen) -> Findings:
    if len(seen.nodes) < 2:
        return
    for node in seen.nodes:
        if node.clock is None:
            continue
        topic, clock = Topic(node.name, CHECK), node.clock
        what = f"{clock.skew_s:+.2f} s from this machine's clock (within {clock.round_trip_s / 2:.2f} s)"
        if abs(clock.skew_s) > MUCH_S + clock.round_trip_s / 2:
            yield topic.info(what, "run an NTP client there: times in logs cannot be compared")
        else:
            yield topic.ok(what)
