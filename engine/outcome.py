"""What follows from a step's result: tokens appended, sequences ended, events to tell?"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.arrivals import finish_reason
from engine.choices import part
from engine.messages import Event, PrefillProgressed, PromptScored, SequenceFailed, TokensSampled
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
    if result.failed:
        _apply_partly(roster, plan, result, events)
        return
    num_decodes = plan.num_decodes
    _apply_decodes(roster, plan.slices[:num_decodes], result.tokens[:num_decodes], events)
    for position in range(num_decodes, len(plan.slices)):
        _apply_chunk(roster, plan.slices[position], position, result, events)
    roster.counters.num_steps += 1


def _apply_partly(roster: Roster, plan: StepPlan, result: StepResult, events: list[Event]) -> None:
    """The failed slices' requests fail, with all their choices; the others do not notice.

    What those computed may hold NaN, too. So nobody will find it in the prefix cache.
    """
    kept = [position for position in range(len(plan.slices)) if position not in result.failed]
    slices = [plan.slices[position] for position in kept]
    num_decodes = sum(position < plan.num_decodes for position in kept)
    rest = StepResult(
        [result.tokens[position] for position in kept],
        {i: result.siblings[p] for i, p in enumerate(kept) if p in result.siblings},
        {i: result.prompt_logprobs[p] for i, p in enumerate(kept) if p in result.prompt_logprobs},
    )
    num_tokens = sum(part.num_tokens for part in slices)
    apply_result(roster, StepPlan(slices, num_tokens, num_decodes), rest, events)
    for position in sorted(result.failed):
        sequence = plan.slices[position].sequence
        if sequence.seq_id not in roster.groups:
            continue  # two choices of one request failed
        error = EngineFault("the model gave no numbers for this request")
        events.append(SequenceFailed(sequence.seq_id, error))
        roster.drop_group(sequence.seq_id)
        live = [choice for group in roster.groups.values() for choice in group]
        roster.cache.invalidate(sequence.token_ids, sequence.cache_salt, live)


def _apply_decodes(
    roster: Roster, decodes: Items[Slice], tokens: Items[Token | None], events: list[Event]
) -> None:
    """The hot loop: runs once per sequence and step, so it looks closely only when an end is possible."""
    finished: list[Sequence] = []
    tell = events.append
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
        tell(TokensSampled(sequence.seq_id, (token,), reason, sequence.num_cached, sequence.index))
    for sequence in finished:
        roster.finish(sequence)
    roster.counters.generated_tokens += len(tokens)


def _apply_chunk(
    roster: Roster, chunk: Slice, position: int, result: StepResult, events: list[Event]
) -> None:
    sequence, token = chunk.sequence, result.tokens[position]
    if chunk.samples != (token is not None):
        raise EngineFault(f"a chunk that samples ({chunk.samples}) gave the wrong kind of result")
    _tell_scores(chunk, result.prompt_logprobs.get(position, ()), events)
    sequence.num_computed += chunk.num_tokens
    roster.cache.register(sequence)
    roster.counters.prompt_tokens_computed += chunk.num_tokens
    if token is not None:
        _apply_first_tokens(roster, sequence, [token, *result.siblings.get(position, ())], events)
    elif sequence.hold:
        events.append(PrefillProgressed(sequence.seq_id, sequence.num_computed))


def _tell_scores(chunk: Slice, scores: Items[Token], events: list[Event]) -> None:
    """Tell the scores that were not told before a preemption."""
    sequence = chunk.sequence
    stop = min(sequence.num_computed + chunk.num_tokens, sequence.num_prompt_tokens - 1)
    start = max(sequence.num_computed, sequence.num_scored)
    if start >= stop:
        return
    if len(scores) != stop - sequence.num_computed:
        raise EngineFault(f"{len(scores)} prompt tokens are scored, not {stop - sequence.num_computed}")
    events.append(PromptScored(sequence.seq_id, tuple(scores[start - stop :])))
    sequence.num_scored = stop


def _apply_first_tokens(
    roster: Roster, sequence: Sequence, tokens: Items[Token], events: list[Event]
) -> None:
    """The sequence and its siblings, if any, part: one of the tokens is for each."""
    choices = [sequence, *sequence.siblings]
    if len(choices) != len(tokens):
        raise EngineFault(f"{len(choices)} choices gave {len(tokens)} first tokens")
    reasons = [_append(roster, choice, token) for choice, token in zip(choices, tokens, strict=True)]
    if sequence.hold and None in reasons:
        events.append(PrefillProgressed(sequence.seq_id, sequence.num_computed))
    for choice, token, reason in zip(choices, tokens, reasons, strict=True):
        events.append(TokensSampled(sequence.seq_id, (token,), reason, sequence.num_cached, choice.index))
    living = [choice for choice, reason in zip(choices, reasons, strict=True) if reason is None]
    part(roster, sequence, living)


def _append(roster: Roster, sequence: Sequence, token: Token) -> FinishReason | None:
    sequence.token_ids.append(token.token_id)
    roster.counters.generated_tokens += 1
    return finish_reason(sequence)
