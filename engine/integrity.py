"""Do blocks, tables and states agree with each other? For tests and for debugging, not for the hot path."""

from __future__ import annotations

from collections import Counter

from engine.config import SchedulerConfig
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from protocol.errors import EngineFault
from protocol.ids import BlockId


def check_roster(roster: Roster, config: SchedulerConfig) -> None:
    """Raise `EngineFault` with the first disagreement."""
    roster.pool.check_integrity()
    _check_states(roster, config)
    _check_references(roster)
    for sequence in roster.sequences.values():
        _check_table(sequence, config)


def _check_states(roster: Roster, config: SchedulerConfig) -> None:
    states = Counter(sequence.state for sequence in roster.sequences.values())
    running = {*roster.decodes, *roster.prefills}
    waiting = roster.waiting.sequences()
    _require(states[SequenceState.FINISHED] == 0, "a finished sequence lives on")
    _require(
        len(running) == roster.num_running == states[SequenceState.RUNNING], "running sequences differ"
    )
    _require(roster.num_fetching == states[SequenceState.FETCHING], "fetching sequences differ")
    _require(roster.num_held == states[SequenceState.HELD], "held sequences differ")
    _require(roster.waiting.num_waiting == states[SequenceState.WAITING], "waiting sequences differ")
    _require(roster.waiting.num_reserving == states[SequenceState.RESERVING], "reserving sequences differ")
    _require(waiting == sorted(waiting, key=roster.policy.key), "the waiting queue is out of order")
    tokens = sum(len(s.token_ids) for s in waiting if s.state is SequenceState.WAITING)
    _require(roster.waiting.num_waiting_tokens == tokens, "the waiting queue's tokens are miscounted")
    _require(roster.num_seats_taken <= config.max_num_seqs, "more sequences run than have a seat")


def _check_references(roster: Roster) -> None:
    references = Counter(b for s in roster.sequences.values() for b in s.block_table)
    for block_id in map(BlockId, range(1, roster.pool.num_total + 1)):
        held, counted = references[block_id], roster.pool.ref_count(block_id)
        _require(held == counted, f"block {block_id} is in {held} tables but has {counted} references")


def _check_table(sequence: Sequence, config: SchedulerConfig) -> None:
    num_blocks, seq_id = len(sequence.block_table), sequence.seq_id
    _require(len(set(sequence.block_table)) == num_blocks, f"{seq_id} has a block twice")
    _require(num_blocks >= config.blocks_for(sequence.num_computed), f"{seq_id} lacks blocks for its KV")
    _require(sequence.num_computed < len(sequence.token_ids), f"{seq_id} has nothing left to compute")
    _require(sequence.num_registered_blocks <= num_blocks, f"{seq_id} registered more blocks than it has")
    if sequence.state in (SequenceState.WAITING, SequenceState.RESERVING):
        _require(num_blocks == 0 and sequence.num_computed == 0, f"{seq_id} waits but has blocks")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise EngineFault(message)
