"""Who is in which state, and what does a change of state do to its blocks?

Every live sequence is here exactly once per state: WAITING, SWAPPED and RESERVING in `waiting`, RUNNING
in `decodes` (one token behind) or `prefills` (further behind, or not sampled since its admission),
FETCHING and HELD counted. The methods are the arrows of the drawing in `engine/sequence.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.block_moves import BlockMoves
from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.config import SchedulerConfig
from engine.plan import Slice
from engine.policy import POLICIES
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, SequenceState
from engine.stats import EngineCounters
from engine.swapping import Swapper
from engine.waiting_queue import WaitingQueue
from protocol.errors import EngineFault
from protocol.ids import BlockId, SequenceId


class Roster:
    """The state that planning reads and outcomes change. Used by one thread."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool | None = None, moves: BlockMoves | None = None
    ) -> None:
        self._config = config
        self.policy = POLICIES[config.policy](config.ageing_tokens)
        self.counters = EngineCounters()
        self.moves = moves or BlockMoves()
        self.pool = pool or BlockPool(config.num_blocks)
        self.tables = BlockTables(config, self.pool, self.moves)
        self.cache = PrefixCache(config, self.pool, self.tables)
        self.swapper = Swapper(config, self.tables, self.moves, self.counters)
        self.groups: dict[SequenceId, list[Sequence]] = {}
        """The born choices of every live request, in order of birth; never an empty list."""
        self.waiting = WaitingQueue(self.policy)
        self.decodes: dict[Sequence, Slice] = {}
        """A decode's slice is the same in every step, so it is kept."""
        self.prefills: dict[Sequence, None] = {}
        self.newborn: dict[Sequence, None] = {}
        """Decodes that may share the block they write to next, until they have one of their own."""
        self.num_fetching = 0
        self.num_held = 0
        self.num_unborn = 0
        """Choices that those with a seat carry: each will need one."""
        self.num_changes = 0
        """How often somebody came to its blocks, or left the collection of its state."""

    @property
    def num_running(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_seats_taken(self) -> int:
        """What counts against `max_num_seqs`."""
        return self.num_running + self.num_fetching + self.num_unborn

    def preemptible(self) -> Iterator[Sequence]:
        """Those that run and whose blocks nobody else reads or writes."""
        yield from self.decodes
        yield from (sequence for sequence in self.prefills if not sequence.hold)

    # ---- Into the engine and to its blocks ----

    def add(self, sequence: Sequence) -> None:
        """New -> WAITING or RESERVING."""
        self.groups[sequence.seq_id] = [sequence]
        self.waiting.push(sequence)

    def admit(self, sequence: Sequence, cached: list[BlockId], num_tokens_covered: int) -> None:
        """WAITING or SWAPPED -> RUNNING, RESERVING -> FETCHING, with a table that starts with `cached`.

        The caller made sure that the pool has the blocks.
        """
        self.num_changes += 1
        self.waiting.remove(sequence)
        self.tables.open(sequence, cached)
        sequence.num_registered_blocks = len(cached)
        num_cached_tokens = len(cached) * self._config.block_size
        if sequence.state is not SequenceState.SWAPPED:
            sequence.num_computed = num_cached_tokens
            self._note_admission(sequence)
        self._cover(sequence, num_tokens_covered)
        self.num_unborn += sequence.num_unborn
        if sequence.state is SequenceState.RESERVING:
            sequence.state = SequenceState.FETCHING
            self.num_fetching += 1
            return
        if sequence.state is SequenceState.SWAPPED:
            self.swapper.swap_in(sequence, len(cached))
        sequence.state = SequenceState.RUNNING
        self.prefills[sequence] = None

    # ---- Between states ----

    def start_decoding(self, sequence: Sequence) -> None:
        """It is one token behind now; stays RUNNING."""
        self.prefills.pop(sequence, None)
        self.decodes[sequence] = Slice(sequence, 1)

    def hold(self, sequence: Sequence) -> None:
        """RUNNING -> HELD: no seat any more, but its blocks. The unborn choices stay with it."""
        self._leave(sequence)
        sequence.state = SequenceState.HELD
        self.num_held += 1

    def admit_fetched(self, sequence: Sequence) -> None:
        """FETCHING -> RUNNING: its blocks hold the KV of all its tokens. The caller has the next one."""
        num_tokens = len(sequence.token_ids)
        self.counters.prompt_tokens_transferred += num_tokens - sequence.num_computed
        self._leave(sequence)
        sequence.num_computed = num_tokens
        self.cache.register(sequence)
        sequence.state = SequenceState.RUNNING
        self.num_unborn += sequence.num_unborn
        self.prefills[sequence] = None

    def bear(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """An unborn choice of a RUNNING sequence -> RUNNING, with its parent's first blocks.

        The caller has taken it from its parent's list of unborn choices, and `num_unborn` down.
        """
        self.num_changes += 1
        child.num_computed = num_computed
        self.tables.open(child, parent.block_table[: self._config.blocks_for(num_computed)])
        self.cache.take_over(child, parent)
        child.num_cached, child.was_admitted = parent.num_cached, True
        child.num_scored = parent.num_scored
        child.state = SequenceState.RUNNING
        self.groups[child.seq_id].append(child)
        self.start_decoding(child)
        self.newborn[child] = self.newborn[parent] = None

    def recompute(self, sequence: Sequence) -> None:
        """FETCHING, RESERVING or RUNNING -> WAITING: what is in its blocks is of no worth."""
        self._leave(sequence)
        self._start_over(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """RUNNING -> SWAPPED or WAITING. What it computed stays cached while nobody needs the blocks."""
        self._leave(sequence)
        self.cache.register(sequence)
        if self.swapper.swap_out(sequence):
            self.counters.num_preemptions_swap += 1
            sequence.num_registered_blocks = 0
            sequence.state = SequenceState.SWAPPED
            self.waiting.push(sequence)
        else:
            self.counters.num_preemptions_recompute += 1
            self._start_over(sequence)

    # ---- Out of the engine ----

    def finish(self, sequence: Sequence) -> None:
        """RUNNING -> gone; what it computed enters the prefix cache."""
        self.cache.register(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Any state -> gone, blocks free, unborn choices gone with it."""
        self._leave(sequence)
        self.tables.close(sequence)
        self.swapper.drop(sequence)
        sequence.state = SequenceState.FINISHED
        group = self.groups[sequence.seq_id]
        group.remove(sequence)
        if not group:
            del self.groups[sequence.seq_id]

    def drop_group(self, seq_id: SequenceId) -> None:
        """All choices of a request -> gone."""
        for sequence in list(self.groups[seq_id]):
            self.drop(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take the sequence out of the collection of its state."""
        self.num_changes += 1
        match sequence.state:
            case SequenceState.WAITING | SequenceState.RESERVING | SequenceState.SWAPPED:
                self.waiting.remove(sequence)
            case SequenceState.RUNNING:
                if self.decodes.pop(sequence, None) is None:
                    del self.prefills[sequence]
                self.newborn.pop(sequence, None)
                self.num_unborn -= sequence.num_unborn
            case SequenceState.FETCHING:
                self.num_fetching -= 1
                self.num_unborn -= sequence.num_unborn
            case SequenceState.HELD:
                self.num_held -= 1
            case SequenceState.FINISHED:
                raise EngineFault("a finished sequence changes its state")

    def _start_over(self, sequence: Sequence) -> None:
        self.tables.close(sequence)
        sequence.num_computed = 0
        sequence.num_registered_blocks = 0
        sequence.is_stale = False
        sequence.state = SequenceState.WAITING
        self.waiting.push(sequence)

    def _cover(self, sequence: Sequence, num_tokens: int) -> None:
        if not self.tables.extend(sequence, num_tokens):
            raise EngineFault(f"a sequence was admitted without blocks for {num_tokens} tokens")

    def _note_admission(self, sequence: Sequence) -> None:
        self.counters.prompt_tokens_cached += sequence.num_computed
        num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
        if sequence.was_admitted:
            if not sequence.has_sampled:  # what was lost and is computed here after all was not given
                sequence.num_cached = min(sequence.num_cached, num_cached)
            return
        sequence.was_admitted = True
        sequence.num_cached = num_cached
        if self.cache.may_give(sequence):
            self.counters.prefix_queries_tokens += len(sequence.token_ids)
            self.counters.prefix_hits_tokens += sequence.num_computed
