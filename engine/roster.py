"""Who is in which state, and what does a change of state do to its blocks?

Every live sequence is here exactly once per state: WAITING and RESERVING in `waiting`, RUNNING in
`decodes` (one token behind) or `prefills` (further behind, or not sampled since its admission),
FETCHING and HELD counted. The methods are the arrows of the drawing in `engine/sequence.py`.
"""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.config import SchedulerConfig
from engine.plan import Slice
from engine.policy import POLICIES
from engine.sequence import Sequence, SequenceState
from engine.stats import EngineCounters
from engine.waiting_queue import WaitingQueue
from protocol.errors import EngineFault
from protocol.ids import BlockId, SequenceId


class Roster:
    """The state that planning reads and outcomes change. Used by one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.policy = POLICIES[config.policy]()
        self.pool = BlockPool(config.num_blocks)
        self.tables = BlockTables(config, self.pool)
        self.counters = EngineCounters()
        self.sequences: dict[SequenceId, Sequence] = {}
        self.waiting = WaitingQueue(self.policy)
        self.decodes: dict[SequenceId, Slice] = {}
        """A decode's slice is the same in every step, so it is kept."""
        self.prefills: dict[SequenceId, Sequence] = {}
        self.num_fetching = 0
        self.num_held = 0

    @property
    def num_running(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_seats_taken(self) -> int:
        """What counts against `max_num_seqs`."""
        return self.num_running + self.num_fetching

    # ---- Into the engine and to its blocks ----

    def add(self, sequence: Sequence) -> None:
        """New -> WAITING or RESERVING."""
        self.sequences[sequence.seq_id] = sequence
        self.waiting.push(sequence)

    def admit(self, sequence: Sequence, cached: list[BlockId], num_tokens_covered: int) -> None:
        """WAITING -> RUNNING or RESERVING -> FETCHING, with a table that starts with `cached`.

        The caller made sure that the pool has the blocks.
        """
        self.waiting.remove(sequence)
        self.tables.open(sequence, cached)
        if not self.tables.extend(sequence, num_tokens_covered):
            raise EngineFault(f"a sequence was admitted without blocks for {num_tokens_covered} tokens")
        self._note_first_admission(sequence)
        if sequence.state is SequenceState.RESERVING:
            sequence.state = SequenceState.FETCHING
            self.num_fetching += 1
        else:
            sequence.state = SequenceState.RUNNING
            self.prefills[sequence.seq_id] = sequence

    # ---- Between states ----

    def start_decoding(self, sequence: Sequence) -> None:
        """It is one token behind now; stays RUNNING."""
        self.prefills.pop(sequence.seq_id, None)
        self.decodes[sequence.seq_id] = Slice(sequence, 1)

    def hold(self, sequence: Sequence) -> None:
        """RUNNING -> HELD: no seat any more, but its blocks."""
        del self.prefills[sequence.seq_id]
        sequence.state = SequenceState.HELD
        self.num_held += 1

    def admit_fetched(self, sequence: Sequence) -> None:
        """FETCHING -> RUNNING: its blocks hold the KV of all tokens but the last."""
        self._leave(sequence)
        sequence.num_computed = len(sequence.token_ids) - 1
        self.tables.register(sequence)
        sequence.state = SequenceState.RUNNING
        self.start_decoding(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """FETCHING or RESERVING -> WAITING: nothing of worth was, or will be, read into its blocks."""
        self._leave(sequence)
        self._wait_again(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """RUNNING -> WAITING. What it computed stays cached while nobody needs the blocks."""
        self.counters.num_preemptions += 1
        self._leave(sequence)
        self.tables.register(sequence)
        self._wait_again(sequence)

    # ---- Out of the engine ----

    def finish(self, sequence: Sequence) -> None:
        """RUNNING -> gone; what it computed enters the prefix cache."""
        self.tables.register(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Any state -> gone, blocks free."""
        self._leave(sequence)
        self.tables.close(sequence)
        sequence.state = SequenceState.FINISHED
        del self.sequences[sequence.seq_id]

    def _leave(self, sequence: Sequence) -> None:
        """Take the sequence out of the collection of its state."""
        match sequence.state:
            case SequenceState.WAITING | SequenceState.RESERVING:
                self.waiting.remove(sequence)
            case SequenceState.RUNNING:
                if self.decodes.pop(sequence.seq_id, None) is None:
                    del self.prefills[sequence.seq_id]
            case SequenceState.FETCHING:
                self.num_fetching -= 1
            case SequenceState.HELD:
                self.num_held -= 1
            case SequenceState.FINISHED:
                raise EngineFault("a finished sequence changes its state")

    def _wait_again(self, sequence: Sequence) -> None:
        self.tables.close(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.push(sequence)

    def _note_first_admission(self, sequence: Sequence) -> None:
        if sequence.was_admitted:
            return
        sequence.was_admitted = True
        sequence.num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
        self.counters.prefix_queries_tokens += len(sequence.token_ids)
        self.counters.prefix_hits_tokens += sequence.num_computed
