"""What is the right answer to every request? That of a lone engine, which does prefill and decode itself.

Only the text is made of its tokens by the router's own code; there is no worker, no wire and no transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from soak_answers import Json, essence
from soak_cases import Case

from cluster.compose import open_model
from cluster.config import ClusterConfig
from cluster.engine_parts import build_engine
from engine import (
    AbortSequence,
    AddSequence,
    EngineCore,
    Event,
    PromptScored,
    SequenceFailed,
    TokensSampled,
)
from protocol.generation import Receipt, Token, TokenDelta
from protocol.ids import RequestId, SequenceId
from router import load_tokenizer
from router.answers import Answers, Piece, TextRequest
from router.openai.completions import CompletionRequest
from router.openai.parameters import validate
from router.openai.prepare import Preparer
from router.openai.replies import CompletionReply, ReplyOptions
from router.tokenizer import Tokenizer


@dataclass
class _Answering:
    request: TextRequest
    fields: CompletionRequest
    answers: Answers
    open_choices: set[int]
    pieces: list[Piece] = field(default_factory=list)
    scores: list[Token] = field(default_factory=list)

    def push(self, event: TokensSampled) -> bool:
        """Whether the choice has ended by what only the router knows: a stop string."""
        delta = TokenDelta(
            self.request.generation.request_id, event.tokens, event.finish_reason, Receipt(), event.index
        )
        if (prompt := self.answers.prompt(event.index, self.scores)) is not None:
            self.pieces.append(prompt)
        piece = self.answers.push(delta)
        self.pieces.append(piece)
        if piece.finish_reason is None:
            return False
        self.open_choices.discard(event.index)
        return event.finish_reason is None

    def whole(self, tokenizer: Tokenizer) -> Json:
        options = ReplyOptions(
            reply_id="golden",
            created=0,
            model=self.fields.model,
            num_choices=self.request.generation.n,
            num_logprobs=self.fields.logprobs,
            num_prompt_logprobs=self.fields.prompt_logprobs,
            has_token_ids=True,
        )
        return essence(CompletionReply(options, tokenizer).whole(self.pieces))


async def golden_answers(config: ClusterConfig, cases: Sequence[Case]) -> list[Json]:
    """The essence of every case's answer, in their order."""
    folder = open_model(config)
    tokenizer = load_tokenizer(folder.path)
    parts = build_engine(config, config.decode, folder)
    length = parts.scheduler.max_model_len
    preparer = Preparer(tokenizer, config.model_name, length, config.max_num_choices)
    core = parts.make_core()
    answering: dict[SequenceId, _Answering] = {}
    for case in cases:
        fields = validate(CompletionRequest, case.body)
        request_id = RequestId(str(case.number))
        [request] = await preparer.completions(fields, partial(RequestId, request_id), 600.0)
        seq_id = SequenceId(str(case.number))
        choices = set(range(request.generation.n))
        answering[seq_id] = _Answering(request, fields, Answers(request, tokenizer), choices)
    _run(core, answering)
    return [one.whole(tokenizer) for one in answering.values()]


def _run(core: EngineCore, answering: dict[SequenceId, _Answering]) -> None:
    for seq_id, one in answering.items():
        generation = one.request.generation
        command = AddSequence(
            seq_id, generation.prompt_token_ids, generation.sampling, num_samples=generation.n
        )
        _take(core, answering, core.handle(command))
    while core.has_work:
        _take(core, answering, core.step())
    core.assert_idle()


def _take(core: EngineCore, answering: dict[SequenceId, _Answering], events: Sequence[Event]) -> None:
    for event in events:
        match event:
            case SequenceFailed():
                raise event.error
            case PromptScored():
                answering[event.seq_id].scores.extend(event.tokens)
            case TokensSampled():
                one = answering[event.seq_id]
                if event.index in one.open_choices and one.push(event):
                    _take(core, answering, core.handle(AbortSequence(event.seq_id, event.index)))
