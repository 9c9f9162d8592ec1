"""When do the choices of one request part, and what becomes of the others when one is dropped?

unborn, in `siblings` --their first token is sampled--> parted: running, finished, or in `branches`
unborn, in `branches` --all tokens but the last have KV--> running
"""

from __future__ import annotations

from engine.roster import Roster
from engine.sequence import Sequence, SequenceState


def part_by_first_token(roster: Roster, parent: Sequence, living: list[Sequence]) -> None:
    """Those of a RUNNING parent's siblings that go on after their first token start to decode.

    Their blocks are the parent's, which may end now.
    """
    roster.num_unborn -= len(parent.siblings)
    parent.siblings = []
    for child in living:
        roster.bear(parent, child, parent.num_computed)


def part_by_last_token(roster: Roster, parent: Sequence) -> None:
    """The branches of a RUNNING parent start to decode: the KV of all tokens but their last is there."""
    roster.num_unborn -= len(parent.branches)
    branches, parent.branches = parent.branches, []
    for child in branches:
        roster.bear(parent, child, len(child.token_ids) - 1)


def hold_together(roster: Roster, parent: Sequence, living: list[Sequence]) -> None:
    """A RUNNING `hold` sequence and its siblings have their first tokens: hold one for all that live."""
    roster.hold(parent)
    parent.siblings = []
    parent.branches = [choice for choice in living if choice is not parent]
    if parent not in living:
        _become_next(parent)


def drop_choice(roster: Roster, seq_id_group: list[Sequence], index: int) -> None:
    """Drop one choice of a live request; nothing happens when it ended already."""
    for sequence in list(seq_id_group):
        if sequence.index == index:
            _drop_born(roster, sequence)
            return
        for unborn in (sequence.siblings, sequence.branches):
            for choice in [choice for choice in unborn if choice.index == index]:
                unborn.remove(choice)
                roster.num_unborn -= _has_seat(sequence)


def _drop_born(roster: Roster, sequence: Sequence) -> None:
    """The next unborn choice goes on in the place of one that is dropped."""
    if not sequence.num_unborn:
        roster.drop(sequence)
        return
    is_queued = sequence.state in (SequenceState.WAITING, SequenceState.RESERVING, SequenceState.SWAPPED)
    if is_queued:
        roster.waiting.remove(sequence)
    _become_next(sequence)
    roster.num_unborn -= _has_seat(sequence)
    if is_queued:
        roster.waiting.push(sequence)


def _become_next(sequence: Sequence) -> None:
    """Turn a sequence into the first choice that it carries; progress and blocks stay."""
    choice = (sequence.siblings or sequence.branches).pop(0)
    sequence.index = choice.index
    sequence.sampling = choice.sampling
    sequence.token_ids = choice.token_ids


def _has_seat(sequence: Sequence) -> bool:
    return sequence.state in (SequenceState.RUNNING, SequenceState.FETCHING)
