"""The parity baseline: the same prompts through one lone engine that does prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.verification.cases import Case
from engine import AddSequence, EngineCore, Event, SequenceFailed, TokensSampled
from protocol.ids import SequenceId


def answer_colocated(core: EngineCore, cases: Sequence[Case]) -> list[list[int]]:
    """Output token ids of all cases, batched as the scheduler likes. Blocks; raises what a sequence raised.

    The engine must be idle, and is idle again afterwards.
    """
    answers: dict[SequenceId, list[int]] = {SequenceId(str(i)): [] for i in range(len(cases))}
    for seq_id, case in zip(answers, cases, strict=True):
        _take(answers, core.handle(AddSequence(seq_id, case.prompt_token_ids, case.sampling)))
    while core.has_work:
        _take(answers, core.step())
    core.assert_idle()
    return list(answers.values())


def _take(answers: dict[SequenceId, list[int]], events: Sequence[Event]) -> None:
    for event in events:
        if isinstance(event, SequenceFailed):
            raise event.error
        if isinstance(event, TokensSampled):
            answers[event.seq_id].extend(token.token_id for token in event.tokens)
