"""What one engine step is to do, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.sequence import Sequence
from protocol.generation import Token


class Slice(NamedTuple):
    """One sequence's part of a step: compute `num_tokens` tokens from `sequence.num_computed` on.

    `sequence.block_table` already covers them. A token is sampled when the slice reaches the end of
    `sequence.token_ids`.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one step, decodes first."""

    slices: Items[Slice]
    num_tokens: int
    """Sum over the slices."""
    num_decodes: int = 0
    """The first so many slices are sequences with one pending token that were decoding before."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per slice of the plan, in its order: the sampled token, or None where none was due."""

    tokens: Items[Token | None]


class Executor(Protocol):
    """Runs a plan on a device. Called by the engine thread only.

    Raises nothing for a well-formed plan; whatever it raises ends the engine (`EngineFault`).
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the KV of every slice's tokens, and sample where a slice is due."""
