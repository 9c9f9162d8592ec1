"""Do blocks, tables and states agree with each other? For tests and for debugging, not for the hot path."""

from __future__ import annotations

from collections import Counter

from engine.config import SchedulerConfig
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from protocol.errors import EngineFault
from protocol.ids import BlockId

_WAITS = (SequenceState.WAITING, SequenceState.RESERVING, SequenceState.SWAPPED)


def check_roster(roster: Roster, config: SchedulerConfig) -> None:
    """Raise `EngineFault` with the first disagreement. Only between steps: a plan is half of one."""
    sequences = [sequence for group in roster.groups.values() for sequence in group]
    roster.pool.check_integrity()
    roster.swapper.pool.check_integrity(block_id for s in sequences for block_id in s.host_table)
    moves = roster.moves
    _require(not (moves.swaps_out or moves.swaps_in or moves.copies), "moves are left from the last plan")
    _check_groups(roster)
    _check_states(roster, config, sequences)
    _check_references(roster, sequences)
    for sequence in sequences:
        _check_table(sequence, config)
        _check_unborn(sequence)


def _check_groups(roster: Roster) -> None:
    for seq_id, group in roster.groups.items():
        choices = [choice for s in group for choice in (s, *s.siblings, *s.branches)]
        _require(bool(group), f"{seq_id} lives without a choice")
        _require(all(choice.seq_id == seq_id for choice in choices), f"{seq_id} has another's choice")
        _require(len({choice.index for choice in choices}) == len(choices), f"{seq_id} has a choice twice")


def _check_states(roster: Roster, config: SchedulerConfig, sequences: list[Sequence]) -> None:
    states = Counter(sequence.state for sequence in sequences)
    running = {*roster.decodes, *roster.prefills}
    waiting, queue = roster.waiting.sequences(), roster.waiting
    _require(states[SequenceState.FINISHED] == 0, "a finished sequence lives on")
    _require(
        len(running) == roster.num_running == states[SequenceState.RUNNING], "running sequences differ"
    )
    _require(roster.newborn.keys() <= roster.decodes.keys(), "a newborn choice does not decode")
    _require(roster.num_fetching == states[SequenceState.FETCHING], "fetching sequences differ")
    _require(roster.num_held == states[SequenceState.HELD], "held sequences differ")
    _require(queue.num_waiting == states[SequenceState.WAITING], "waiting sequences differ")
    _require(queue.num_swapped == states[SequenceState.SWAPPED], "swapped sequences differ")
    _require(queue.num_reserving == states[SequenceState.RESERVING], "reserving sequences differ")
    _require(waiting == sorted(waiting, key=roster.policy.key), "the waiting queue is out of order")
    tokens = sum(s.num_pending for s in waiting if s.state is not SequenceState.RESERVING)
    _require(queue.num_waiting_tokens == tokens, "the waiting queue's tokens are miscounted")
    seated = (SequenceState.RUNNING, SequenceState.FETCHING)
    num_unborn = sum(s.num_unborn for s in sequences if s.state in seated)
    _require(roster.num_unborn == num_unborn, "unborn choices are miscounted")
    _require(roster.num_seats_taken <= config.max_num_seqs, "more sequences run than have a seat")


def _check_references(roster: Roster, sequences: list[Sequence]) -> None:
    users: dict[BlockId, list[Sequence]] = {}
    for sequence in sequences:
        for block_id in sequence.block_table:
            users.setdefault(block_id, []).append(sequence)
    for block_id in map(BlockId, range(1, roster.pool.num_total + 1)):
        held, counted = users.get(block_id, []), roster.pool.ref_count(block_id)
        names = ", ".join(f"{s.seq_id}#{s.index}" for s in held)
        _require(
            len(held) == counted, f"block {block_id} is used by ({names}) but has {counted} references"
        )
        _require(
            roster.tables.users_of(block_id) == set(held), f"the users of {block_id} are not ({names})"
        )


def _check_table(sequence: Sequence, config: SchedulerConfig) -> None:
    num_blocks, seq_id = len(sequence.block_table), sequence.seq_id
    is_swapped = sequence.state is SequenceState.SWAPPED
    needed = config.blocks_for(sequence.num_computed)
    _require(len(set(sequence.block_table)) == num_blocks, f"{seq_id} has a block twice")
    _require(is_swapped or num_blocks >= needed, f"{seq_id} lacks blocks for its KV")
    _require(len(sequence.host_table) == needed * is_swapped, f"{seq_id} has the wrong blocks on the host")
    # The prefix cache may have given all tokens of one that takes its next token from elsewhere.
    may_be_whole = sequence.state is SequenceState.FETCHING
    _require(sequence.num_pending >= 1 - may_be_whole, f"{seq_id} has nothing left to compute")
    _require(sequence.num_registered_blocks <= num_blocks, f"{seq_id} registered more blocks than it has")
    if sequence.state in _WAITS:
        _require(num_blocks == 0, f"{seq_id} waits but has blocks")
        _require(is_swapped or sequence.num_computed == 0, f"{seq_id} waits but has KV")


def _check_unborn(sequence: Sequence) -> None:
    for choice in (*sequence.siblings, *sequence.branches):
        name = f"{choice.seq_id}#{choice.index}"
        _require(not choice.block_table and not choice.host_table, f"{name} has blocks before it is born")
        _require(choice.token_ids[:-1] == sequence.token_ids[:-1], f"{name} is not the first one's twin")
    for sibling in sequence.siblings:
        _require(sibling.token_ids[-1] == sequence.token_ids[-1], f"{sibling.seq_id} parted too early")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise EngineFault(message)
