"""What goes wrong, when, and to whom? One random fault after another, each with a line in the log."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from soak_streams import RouterStreams
from soak_workers import FAIL_READ, LOSE_RENEWAL, LOSE_VERDICT

from cluster.processes import ProcessCluster, ProcessRecord
from protocol.errors import WorkerUnavailable
from protocol.ids import Role
from rpc import CallFaultKind

STOP_S = 10.0
STREAM_DELAYS_S = (0.1, 1.0, 3.0, 6.0)
"""The last one is longer than a router waits for a frame."""


class SoakFault(StrEnum):
    """What can happen."""

    KILL_PREFILL = "kill_prefill"
    KILL_DECODE = "kill_decode"
    STOP = "stop"
    """SIGSTOP for `STOP_S`, of either role."""
    TRANSFER_ERROR = "transfer_error"
    """A decode worker's next read."""
    LOST_RENEWAL = "lost_renewal"
    LOST_VERDICT = "lost_verdict"
    STREAM_DELAY = "stream_delay"
    """A message between the router and a worker, one way or the other, and what comes behind it."""
    STREAM_SILENCE = "stream_silence"
    """Nothing more gets through between them, and neither is told."""
    STREAM_CUT = "stream_cut"
    HANG_UP = "hang_up"
    """A client leaves."""


_ROLES = {
    SoakFault.KILL_PREFILL: (Role.PREFILL,),
    SoakFault.KILL_DECODE: (Role.DECODE,),
    SoakFault.STOP: (Role.PREFILL, Role.DECODE),
    SoakFault.TRANSFER_ERROR: (Role.DECODE,),
    SoakFault.LOST_RENEWAL: (Role.DECODE,),
    SoakFault.LOST_VERDICT: (Role.DECODE,),
    SoakFault.STREAM_DELAY: (Role.PREFILL, Role.DECODE),
    SoakFault.STREAM_SILENCE: (Role.PREFILL, Role.DECODE),
    SoakFault.STREAM_CUT: (Role.PREFILL, Role.DECODE),
}
_SIGNALS = {
    SoakFault.TRANSFER_ERROR: FAIL_READ,
    SoakFault.LOST_RENEWAL: LOSE_RENEWAL,
    SoakFault.LOST_VERDICT: LOSE_VERDICT,
}
_ON_STREAMS = {
    SoakFault.STREAM_DELAY: CallFaultKind.DELAY,
    SoakFault.STREAM_SILENCE: CallFaultKind.DROP,
    SoakFault.STREAM_CUT: CallFaultKind.DISCONNECT,
}


@dataclass(frozen=True, slots=True)
class Happened:
    """One line of the log."""

    at_s: float
    """Since the start."""
    kind: SoakFault
    victim: str


class FaultInjector:
    """Makes a fault every so often, until it is stopped. Used on one event loop."""

    def __init__(
        self,
        cluster: ProcessCluster,
        streams: RouterStreams,
        hang_up: Callable[[random.Random], str | None],
        *,
        every_s: float,
        seed: int,
        log: Callable[[str], None],
    ) -> None:
        """`streams` are those of the cluster's router. `hang_up` makes a client leave and says which one;
        None when none is there."""
        self.happened: list[Happened] = []
        self._cluster = cluster
        self._streams = streams
        self._hang_up = hang_up
        self._every_s = every_s
        self._rng = random.Random(f"faults {seed}")
        self._log = log
        self._started_s = time.monotonic()
        self._stopped: dict[str, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        """Until cancelled; whoever is stopped then is not any more."""
        try:
            while True:
                await asyncio.sleep(self._every_s)
                self._make_one()
        finally:
            for name, timer in list(self._stopped.items()):
                timer.cancel()
                self._resume(name)

    def counts(self) -> Counter[str]:
        return Counter(fault.kind.value for fault in self.happened)

    def _make_one(self) -> None:
        """The next kind that is possible now."""
        kinds = list(SoakFault)
        self._rng.shuffle(kinds)
        for kind in kinds:
            victim = self._try(kind)
            if victim is not None:
                fault = Happened(time.monotonic() - self._started_s, kind, victim)
                self.happened.append(fault)
                self._log(f"[{fault.at_s:7.2f} s] {fault.kind.value}: {fault.victim}")
                return

    def _try(self, kind: SoakFault) -> str | None:
        """Whom it hit; None when there is nobody."""
        if kind is SoakFault.HANG_UP:
            return self._hang_up(self._rng)
        fit = [w for role in _ROLES[kind] for w in self._cluster.workers(role) if self._is_fit(w)]
        if not fit:
            return None
        victim = self._rng.choice(fit)
        try:
            how = self._hit(kind, victim)
        except (WorkerUnavailable, ProcessLookupError):  # it ended a moment ago
            return None
        return f"{victim.name} (pid {victim.pid}, incarnation {victim.incarnation}){how}"

    def _is_fit(self, worker: ProcessRecord) -> bool:
        return worker.is_ready and worker.name not in self._stopped

    def _hit(self, kind: SoakFault, victim: ProcessRecord) -> str:
        """Returns what else there is to say of it."""
        if kind in _ON_STREAMS:
            return self._hit_stream(_ON_STREAMS[kind], victim)
        if kind in (SoakFault.KILL_PREFILL, SoakFault.KILL_DECODE):
            self._cluster.kill(victim.name)
        elif kind is SoakFault.STOP:
            self._cluster.pause(victim.name)
            loop = asyncio.get_running_loop()
            self._stopped[victim.name] = loop.call_later(STOP_S, self._resume, victim.name)
        else:
            os.kill(victim.pid, _SIGNALS[kind])
        return ""

    def _hit_stream(self, kind: CallFaultKind, victim: ProcessRecord) -> str:
        is_received = self._rng.random() < 0.5
        delay_s = self._rng.choice(STREAM_DELAYS_S) if kind is CallFaultKind.DELAY else 0.0
        self._streams.script(victim.address, kind, delay_s, is_received=is_received)
        direction = "from" if is_received else "to"
        return f": the next message {direction} it{f', by {delay_s:g} s' if delay_s else ''}"

    def _resume(self, name: str) -> None:
        del self._stopped[name]
        with suppress(WorkerUnavailable):
            self._cluster.resume(name)
