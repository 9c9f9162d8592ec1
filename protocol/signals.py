"""How hard is a worker's stage pressed? What decides on the number of workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageSignals:
    """Of one worker, now. All are 0 when it has nothing to do."""

    queue_wait_s: float = 0.0
    """Seconds until the tokens that are still to be computed are, at the rate of late."""
    busy: float = 0.0
    """Share of the time, of late, in which the engine computed: 0 to 1."""
    block_use: float = 0.0
    """Used share of the KV blocks: 0 to 1."""
    block_demand: float = 0.0
    """What waits for KV blocks of this worker, as a share of all its blocks: 0 and up."""
