"""The noise of sampling: one uniform number as a pure function of (seed, position).

No generator, hence no state to ship: a sequence that is split over two workers, preempted or resumed
draws the same numbers at the same positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NUM_BITS = 48


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per pair; `seeds` are unsigned 64 bit, `positions` absolute.

    The seed is mixed before the position is added, so that neighbouring seeds share no numbers. 48 bits
    keep a uniform times any total strictly below that total.
    """
    state = _mix(np.array(seeds, dtype=np.uint64)) + np.array(positions, dtype=np.uint64) * _GOLDEN
    bits = _mix(state) >> np.uint64(64 - _NUM_BITS)
    return (bits.astype(np.float64) + 0.5) * 2.0**-_NUM_BITS


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea and Flood, 2014). Arrays wrap silently, as it needs."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
