"""When do the choices of one request part, and what becomes of the others when one is dropped?

unborn, in `siblings` --they have their first tokens--> parted: running, finished, or in `branches`
unborn, in `branches` --all tokens but the last have KV--> running

First tokens are sampled here, or elsewhere (those of a reserved sequence).
"""

from __future__ import annotations

from dataclasses import replace

from engine.arrivals import finish_reason
from engine.messages import FirstTokens
from engine.prefix_hash import MAX_TOKEN_ID
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from protocol.errors import InvalidRequest


def part(roster: Roster, parent: Sequence, living: list[Sequence]) -> None:
    """A RUNNING parent and its siblings have a next token each; those in `living` go on after it.

    They decode, and so do the parent's branches; but what comes from a `hold` one is held as one.
    """
    if parent.hold and living:
        roster.hold(parent)
        _carry(parent, living)
        return
    _bear_siblings(roster, parent, [choice for choice in living if choice is not parent])
    _bear_branches(roster, parent)
    if parent in living:
        roster.start_decoding(parent)
    else:
        roster.finish(parent)


def why_not_from(parent: Sequence, first_tokens: FirstTokens) -> InvalidRequest | None:
    """Return why the choices of a reserved sequence can't go on from these tokens; None when they can."""
    tokens = dict(first_tokens)
    if len(tokens) < len(first_tokens) or not tokens.keys() <= {*parent.indices}:
        return InvalidRequest("the first tokens are not one for each choice that goes on")
    if not all(0 <= token_id <= MAX_TOKEN_ID for token_id in tokens.values()):
        return InvalidRequest("a first token's id is out of range")
    for choice in _named(parent, first_tokens):
        if finish_reason(replace(choice, token_ids=[*choice.token_ids, tokens[choice.index]])) is not None:
            return InvalidRequest(
                f"choice {choice.index} is complete with its first token: nothing is left to generate"
            )
    return None


def decode_from(roster: Roster, parent: Sequence, first_tokens: FirstTokens) -> None:
    """A FETCHING parent's tokens have their KV: its choices go on from tokens sampled elsewhere."""
    living = _named(parent, first_tokens)
    roster.admit_fetched(parent)
    _append(living, first_tokens)
    part(roster, parent, living)


def recompute_from(roster: Roster, parent: Sequence, first_tokens: FirstTokens) -> None:
    """The same for a FETCHING or RESERVING parent whose KV must be computed here: it waits for that."""
    living = _named(parent, first_tokens)
    if not living:
        roster.drop(parent)
        return
    roster.recompute(parent)
    roster.waiting.remove(parent)
    _append(living, first_tokens)
    _carry(parent, living)
    roster.waiting.push(parent)


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


def _bear_siblings(roster: Roster, parent: Sequence, living: list[Sequence]) -> None:
    """Those that go on after their first token start with the parent's blocks; it may end now."""
    roster.num_unborn -= len(parent.siblings)
    parent.siblings = []
    for child in living:
        roster.bear(parent, child, parent.num_computed)


def _bear_branches(roster: Roster, parent: Sequence) -> None:
    """The KV of all their tokens but the last is there."""
    roster.num_unborn -= len(parent.branches)
    branches, parent.branches = parent.branches, []
    for child in branches:
        roster.bear(parent, child, len(child.token_ids) - 1)


def _carry(parent: Sequence, living: list[Sequence]) -> None:
    """The first one of those that live goes on in the parent's place, with the others as its branches."""
    parent.siblings = []
    parent.branches = [choice for choice in living if choice is not parent]
    if parent not in living:
        _become_next(parent)


def _named(parent: Sequence, first_tokens: FirstTokens) -> list[Sequence]:
    """The choices that have a first token, without those that were aborted meanwhile."""
    tokens = dict(first_tokens)
    return [choice for choice in (parent, *parent.siblings) if choice.index in tokens]


def _append(living: list[Sequence], first_tokens: FirstTokens) -> None:
    tokens = dict(first_tokens)
    for choice in living:
        choice.token_ids.append(tokens[choice.index])
        choice.num_given_tokens += 1


def _become_next(sequence: Sequence) -> None:
    """Turn a sequence into the first choice that it carries; progress and blocks stay."""
    choice = (sequence.siblings or sequence.branches).pop(0)
    sequence.index = choice.index
    sequence.sampling = choice.sampling
    sequence.token_ids = choice.token_ids
    sequence.num_given_tokens = choice.num_given_tokens


def _has_seat(sequence: Sequence) -> bool:
    return sequence.state in (SequenceState.RUNNING, SequenceState.FETCHING)
