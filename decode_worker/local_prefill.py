"""How does a decode worker compute a prompt itself? As any engine would; no other worker is asked.

For prompts that are short, or whose KV is mostly here, and for all of them when no prefill worker is left.
"""

from __future__ import annotations

from decode_worker.tools import IntakeTools
from engine import AbortSequence, AddSequence, BlocksAllocated, FirstTokens, TokensSampled
from protocol.errors import InvalidRequest, SplitserveError
from protocol.generation import GenerationRequest, Receipt
from protocol.ids import SequenceId


class LocalPrefill:
    """A request without a ticket; the counterpart of `Intake`. All its tokens come from this engine."""

    def __init__(self, request: GenerationRequest, seq_id: SequenceId, tools: IntakeTools) -> None:
        self._request = request
        self._seq_id = seq_id
        self._tools = tools
        self._received_s = tools.clock()
        self._is_added = False
        self._dropped: SplitserveError | None = None
        self._unwanted_choices: list[int] = []

    def allocated(self, event: BlocksAllocated) -> None:
        """Not told about sequences that nobody reads or fills from outside."""

    def begin(self, first_tokens: FirstTokens) -> None:
        raise InvalidRequest("nobody else samples first tokens of a request without a ticket")

    def drop(self, error: SplitserveError) -> None:
        """Nobody wants the sequence any more; before `run`, it never comes to be."""
        self._dropped = error
        if self._is_added:
            self._tools.engine.post(AbortSequence(self._seq_id))

    def drop_choice(self, index: int) -> None:
        """As `drop` for one choice of several; the others go on."""
        if self._is_added:
            self._tools.engine.post(AbortSequence(self._seq_id, index))
        else:
            self._unwanted_choices.append(index)

    def receipt(self, first: TokensSampled) -> Receipt:
        """For the first delta."""
        return Receipt(
            prefill_s=self._tools.clock() - self._received_s, num_cached_tokens=first.num_cached_tokens
        )

    async def run(self) -> None:
        """Hand the sequence to the engine. Raises the error of `drop`, or the engine's refusal."""
        if self._dropped is not None:
            raise self._dropped
        request = self._request
        self._tools.engine.post(
            AddSequence(
                self._seq_id,
                request.prompt_token_ids,
                request.sampling,
                request.output_token_ids,
                priority=request.priority,
                cache_salt=request.cache_salt,
                index=request.index,
                num_samples=request.n,
            )
        )
        self._is_added = True
        for index in self._unwanted_choices:
            self.drop_choice(index)
