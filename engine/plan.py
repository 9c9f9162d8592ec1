"""What one engine step is to do, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.sequence import Sequence
from protocol.generation import Token
from protocol.ids import BlockId, HostBlockId


class Slice(NamedTuple):
    """One sequence's part of a step: compute `num_tokens` tokens from `sequence.num_computed` on.

    `sequence.block_table` already covers them. A token is sampled when the slice reaches the end of
    `sequence.token_ids`, and then one for each of `sequence.siblings`, from the same logits row.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The moves and the slices of one step, decodes first.

    Carried out in this order: all of `swaps_out`, of `swaps_in`, of `copies` (each in order), then the
    slices. A plan may have moves and no slices.
    """

    slices: Items[Slice]
    num_tokens: int
    """Sum over the slices."""
    num_decodes: int = 0
    """The first so many slices are sequences with one pending token that were decoding before."""
    copies: Items[tuple[BlockId, BlockId]] = ()
    """(source, destination), both in the device pool."""
    swaps_out: Items[tuple[BlockId, HostBlockId]] = ()
    swaps_in: Items[tuple[HostBlockId, BlockId]] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing is to be done."""
        return not (self.slices or self.copies or self.swaps_out or self.swaps_in)

    @property
    def moved_block_ids(self) -> frozenset[BlockId]:
        """Device blocks that the moves read or write."""
        copied = (block_id for pair in self.copies for block_id in pair)
        swapped_out = (source for source, _ in self.swaps_out)
        swapped_in = (destination for _, destination in self.swaps_in)
        return frozenset((*copied, *swapped_out, *swapped_in))


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per slice of the plan, in its order: the sampled token, or None where none was due."""

    tokens: Items[Token | None]
    siblings: Mapping[int, Items[Token]] = field(default_factory=dict)
    """Position of a slice that samples -> the tokens of its sequence's siblings, in their order."""
    prompt_logprobs: Mapping[int, Items[Token]] = field(default_factory=dict)
    """Position of a slice -> the prompt tokens that follow the positions which it computed, scored.

    A slice over positions [start, stop) of a prompt of n tokens scores the tokens at start + 1, ...,
    min(stop, n - 1); where that is none, nothing or an empty list is given.
    """
    failed: Collection[int] = ()
    """Positions of slices for which the model gave no numbers (NaN, or nothing but minus infinity): their
    requests fail, and whatever else is said about these slices means nothing."""


class Executor(Protocol):
    """Runs a plan on a device. Called by the engine thread only.

    All of it is done when the call returns: others read what a step wrote, and write over what it moved,
    as soon as its events are told.

    Raises nothing for a well-formed plan; whatever it raises ends the engine (`EngineFault`).
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Move blocks, write the KV of every slice's tokens, and sample where a slice is due."""
