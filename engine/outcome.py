"""What follows from a step's result: tokens appended, sequences ended, events to tell?"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.arrivals import finish_reason
from engine.messages import Event, PrefillProgressed, TokensSampled
from engine.plan import Slice, StepPlan, StepResult
from engine.roster import Roster
from engine.sequence import Sequence
from protocol.errors import EngineFault
from protocol.generation import FinishReason, Token


def apply_result(roster: Roster, plan: StepPlan, result: StepResult, events: list[Event]) -> None:
    """Advance the plan's sequences, and append what there is to tell to `events`, in the plan's order.

    A sequence is gone only after its last event was appended, so that none goes untold when a broken
    invariant (`EngineFault`) ends this half-way.
    """
    if len(result.tokens) != len(plan.slices):
        raise EngineFault(f"{len(plan.slices)} slices gave {len(result.tokens)} results")
    if not plan.slices:
        return
    num_decodes = plan.num_decodes
    _apply_decodes(roster, plan.slices[:num_decodes], result.tokens[:num_decodes], events)
    for chunk, token in zip(plan.slices[num_decodes:], result.tokens[num_decodes:], strict=True):
        _apply_chunk(roster, chunk, token, events)
    roster.counters.num_steps += 1


def _apply_decodes(
    roster: Roster, decodes: Items[Slice], tokens: Items[Token | None], events: list[Event]
) -> None:
    """The hot loop: runs once per sequence and step, so it looks closely only when an end is possible."""
    finished: list[Sequence] = []
    for (sequence, _), token in zip(decodes, tokens, strict=True):
        if token is None:
            raise EngineFault("a decode slice gave no token")
        token_ids = sequence.token_ids
        token_ids.append(token.token_id)
        sequence.num_computed += 1
        reason: FinishReason | None = None
        if len(token_ids) >= sequence.length_limit or token.token_id in sequence.stop_token_ids:
            reason = finish_reason(sequence)
            if reason is not None:
                finished.append(sequence)
        events.append(TokensSampled(sequence.seq_id, (token,), reason, sequence.num_cached))
    for sequence in finished:
        roster.finish(sequence)
    roster.counters.generated_tokens += len(tokens)


def _apply_chunk(roster: Roster, chunk: Slice, token: Token | None, events: list[Event]) -> None:
    sequence = chunk.sequence
    if chunk.samples != (token is not None):
        raise EngineFault(f"a chunk that samples ({chunk.samples}) gave the wrong kind of result")
    sequence.num_computed += chunk.num_tokens
    roster.tables.register(sequence)
    roster.counters.prompt_tokens_computed += chunk.num_tokens
    reason = None if token is None else _append(roster, sequence, token)
    if sequence.hold and reason is None:
        events.append(PrefillProgressed(sequence.seq_id, sequence.num_computed))
    if token is not None:
        events.append(TokensSampled(sequence.seq_id, (token,), reason, sequence.num_cached))
        _after_first_token(roster, sequence, reason)


def _append(roster: Roster, sequence: Sequence, token: Token) -> FinishReason | None:
    sequence.token_ids.append(token.token_id)
    roster.counters.generated_tokens += 1
    return finish_reason(sequence)


def _after_first_token(roster: Roster, sequence: Sequence, reason: FinishReason | None) -> None:
    if reason is not None:
        roster.finish(sequence)
    elif sequence.hold:
        roster.hold(sequence)
    else:
        roster.start_decoding(sequence)
