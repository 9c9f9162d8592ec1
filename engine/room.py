"""What would be left of seats, blocks and tokens beside a newcomer, and who must give way for that?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from functools import cached_property

from engine.cached_prefix import CachedPrefix
from engine.config import SchedulerConfig
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from protocol.ids import BlockId


class Room:
    """Only counts: the roster stays as it is. What is negative is lacking.

    A newcomer leaves the blocks that admitted prefills will need, and the low watermark while anyone runs.
    """

    def __init__(
        self, config: SchedulerConfig, roster: Roster, newcomer: Sequence, cached: CachedPrefix
    ) -> None:
        self._config = config
        self._roster = roster
        self._newcomer = newcomer
        self.cached = cached
        self._num_running = roster.num_running
        self._num_decodes = len(roster.decodes)
        self._returned: Counter[BlockId] = Counter()
        self.num_seats = config.max_num_seqs - roster.num_seats_taken - 1 - newcomer.num_unborn
        """Left when the newcomer and its choices have theirs."""
        num_blocks = config.blocks_for(len(newcomer.token_ids))
        self.num_spoken_for = sum(self._promised_to(sequence) for sequence in roster.prefills)
        self.num_spoken_for += config.num_low_blocks if roster.num_running else 0
        self.num_blocks = roster.tables.num_free_after(cached, num_blocks) - self.num_spoken_for
        """Left when it has a table for all of its tokens, and the others have what they count on."""

    @property
    def is_enough(self) -> bool:
        return self.num_seats >= 0 and self.num_blocks >= 0

    @property
    def has_tokens(self) -> bool:
        """Whether those that the newcomer does not outrank leave it tokens of the step, if it needs any."""
        return self._has_tokens_beside(self._num_decodes)

    def _has_tokens_beside(self, num_decodes: int) -> bool:
        needs_none = self._newcomer.state is SequenceState.RESERVING
        return needs_none or self._num_tokens_ahead < self._config.prefill_budget(num_decodes)

    @cached_property
    def _num_tokens_ahead(self) -> int:
        outranks, limit = self._roster.policy.outranks, self._config.long_prefill_token_threshold
        return sum(
            min(sequence.num_pending, limit or sequence.num_pending)
            for sequence in self._roster.prefills
            if not outranks(self._newcomer, sequence)
        )

    def may_be_enough_without(self, victims: Items[Sequence]) -> bool:
        """Quick, because blocks that victims share count for each of them; but for that it is right."""
        num_decodes = self._num_decodes - sum(victim in self._roster.decodes for victim in victims)
        num_seats = self.num_seats + sum(1 + victim.num_unborn for victim in victims)
        num_blocks = self.num_blocks + self._config.num_low_blocks * (len(victims) == self._num_running)
        num_blocks += sum(len(victim.block_table) + self._promised_to(victim) for victim in victims)
        return num_seats >= 0 and num_blocks >= 0 and self._has_tokens_beside(num_decodes)

    def take_from(self, victim: Sequence) -> None:
        """Count a running sequence as gone."""
        self._num_running -= 1
        self._num_decodes -= victim in self._roster.decodes
        self.num_seats += 1 + victim.num_unborn
        self.num_blocks += self._promised_to(victim) + self._num_returned_by(victim)
        if not self._num_running:
            self.num_blocks += self._config.num_low_blocks

    def _num_returned_by(self, victim: Sequence) -> int:
        """Blocks that nobody is left to need: not the newcomer either, who shares its cached ones."""
        kept, pool, num_returned = self.cached, self._roster.pool, 0
        for block_id in victim.block_table:
            self._returned[block_id] += 1
            if self._returned[block_id] == pool.ref_count(block_id) and block_id not in kept:
                num_returned += 1
        return num_returned

    def _promised_to(self, sequence: Sequence) -> int:
        """Blocks that an admitted prefill will still need."""
        if sequence not in self._roster.prefills:
            return 0
        return self._config.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)


def who_gives_way(room: Room, outranked: list[Sequence], roster: Roster) -> list[Sequence] | None:
    """Return the last of `outranked`, as few as the newcomer needs to get in; None when all are too few.

    `room` is as it is without them then.
    """
    victims: list[Sequence] = []
    candidates = sorted(outranked, key=roster.policy.key)
    while not (room.is_enough and room.has_tokens):
        if not candidates:
            return None
        victims.append(candidates.pop())
        room.take_from(victims[-1])
    return victims
