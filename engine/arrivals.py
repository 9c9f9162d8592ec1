"""May a new sequence enter the engine, and as what?"""

from __future__ import annotations

from dataclasses import replace

from engine.config import SchedulerConfig
from engine.messages import AddSequence, ReserveSequence
from engine.prefix_hash import MAX_TOKEN_ID
from engine.sequence import Sequence, SequenceState
from protocol.errors import InvalidRequest
from protocol.generation import FinishReason, choice_seed


def sequence_from(
    command: AddSequence | ReserveSequence,
    config: SchedulerConfig,
    eos_token_ids: frozenset[int],
    arrival_index: int,
    now_s: float,
) -> Sequence:
    """Build the sequence that a command asks for, with its unborn choices; WAITING or RESERVING."""
    sequence = _first_choice(command, config, eos_token_ids, arrival_index, now_s)
    sequence.siblings = [_another_choice(sequence, i) for i in range(1, command.num_samples)]
    return sequence


def _first_choice(
    command: AddSequence | ReserveSequence,
    config: SchedulerConfig,
    eos_token_ids: frozenset[int],
    arrival_index: int,
    now_s: float,
) -> Sequence:
    sampling = command.sampling
    num_prompt_tokens = len(command.prompt_token_ids)
    reserves = isinstance(command, ReserveSequence)
    stop_token_ids = frozenset(sampling.stop_token_ids)
    # Whoever comes with output was scored on its first leg; whoever is reserved, by its prefill worker.
    to_score = sampling.prompt_logprobs is not None and not (command.output_token_ids or reserves)
    return Sequence(
        seq_id=command.seq_id,
        sampling=sampling,
        token_ids=[*command.prompt_token_ids, *command.output_token_ids],
        num_prompt_tokens=num_prompt_tokens,
        hold=isinstance(command, AddSequence) and command.hold,
        priority=command.priority,
        cache_salt=command.cache_salt,
        arrival_s=now_s,
        state=SequenceState.RESERVING if reserves else SequenceState.WAITING,
        num_given_tokens=num_prompt_tokens + len(command.output_token_ids),
        arrival_index=arrival_index,
        length_limit=min(num_prompt_tokens + sampling.max_tokens, config.max_model_len),
        min_length=num_prompt_tokens + sampling.min_tokens,
        stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | eos_token_ids,
        index=command.index,
        indices=range(command.index, command.index + command.num_samples),
        num_scored=0 if to_score else max(num_prompt_tokens - 1, 0),
    )


def _another_choice(first: Sequence, number: int) -> Sequence:
    """A choice that `first` carries until it is born."""
    return replace(
        first,
        index=first.index + number,
        sampling=replace(first.sampling, seed=choice_seed(first.sampling.seed, number)),
        token_ids=[*first.token_ids],
        state=SequenceState.WAITING,
        block_table=[],
        block_keys=[],
        siblings=[],
        branches=[],
        host_table=[],
    )


def why_never(sequence: Sequence, config: SchedulerConfig) -> InvalidRequest | None:
    """Return why this engine can never serve the sequence; None when it can."""
    if sequence.num_prompt_tokens == 0:
        return InvalidRequest("the prompt is empty", param="prompt")
    if not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) <= MAX_TOKEN_ID:
        return InvalidRequest("a token id is out of range", param="prompt")
    if sequence.num_prompt_tokens >= config.max_model_len:
        return InvalidRequest(
            f"the prompt has {sequence.num_prompt_tokens} tokens; with at least one output token that is "
            f"more than the model's context of {config.max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    if finish_reason(sequence) is not None:
        return InvalidRequest(
            "the sequence is complete already: nothing is left to generate", param="max_tokens"
        )
    return _why_too_many(sequence, config) or _why_too_large(sequence, config)


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Return why the sequence ends with the tokens that it has; None when it goes on."""
    length = len(sequence.token_ids)
    may_stop = length > sequence.num_prompt_tokens and length >= sequence.min_length
    if may_stop and sequence.token_ids[-1] in sequence.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= sequence.length_limit else None


def _why_too_many(sequence: Sequence, config: SchedulerConfig) -> InvalidRequest | None:
    num_choices = 1 + sequence.num_unborn
    if num_choices <= config.max_num_seqs:
        return None
    return InvalidRequest(
        f"{num_choices} choices are asked for, and this worker runs {config.max_num_seqs} sequences: "
        "ask for fewer",
        param="n",
    )


def _why_too_large(sequence: Sequence, config: SchedulerConfig) -> InvalidRequest | None:
    # The last sampled token has no KV; a held sequence stops growing after its next token.
    num_kv_tokens = len(sequence.token_ids) if sequence.hold else sequence.length_limit - 1
    num_blocks = config.blocks_for(num_kv_tokens)
    if num_blocks <= config.num_usable_blocks:
        return None
    return InvalidRequest(
        f"the sequence may grow to {num_blocks} KV blocks of {config.block_size} tokens, and this worker "
        f"has {config.num_usable_blocks}: ask for fewer tokens",
        param="max_tokens",
    )
