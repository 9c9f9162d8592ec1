"""What is known about one request while it runs: what its client has, and who let it down."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from protocol.errors import LeaseExpired, Overloaded, SplitserveError, TransferError
from protocol.generation import GenerationRequest, SamplingParams, Token, TokenDelta, choice_seed
from protocol.ids import RequestId, WorkerIdentity
from router.deadline import Deadline
from router.kinds import Content, content_of
from router.ports import Worker


@dataclass(slots=True)
class Run:
    """What is known about a request, or about a choice that goes on by itself, across its legs."""

    request: GenerationRequest
    deadline: Deadline
    max_failures: int
    """So many in a row, without a decode worker that got on in between; a further one ends the request."""
    emitted: dict[int, list[int]]
    """Token ids that the client has, by choice; those that have ended or were dropped are gone."""
    has_emitted: bool = False
    contents: frozenset[Content] = frozenset()
    """Of the workers of the first leg that came to tokens or scores: only their like may go on."""
    needs_handoff: bool = False
    """It is to prove that a hand-off works: no decode worker may compute the prompt instead."""
    num_failures: int = 0
    """Lost readers that its tickets were offered to, and legs that failed."""
    num_vain_failures: int = 0
    """Those since a leg last got on: work that gets on may meet any number of mishaps, while what kills its
    workers does not get on."""
    num_tokens_of_leg: int = 0
    """What the client got since the last failure."""
    num_faults: int = 0
    """Those of the failures that were an engine's fault: the request may be what breaks engines."""
    failed: set[WorkerIdentity] = field(default_factory=set)
    """Workers that let this request down; others are preferred."""
    failed_owners: set[WorkerIdentity] = field(default_factory=set)
    """Those of them that compute prompts, and broke over it: being full is no reason to do without one."""
    owner: WorkerIdentity | None = None
    """Whose KV the running leg is about, if anybody's."""
    current: WorkerIdentity | None = None
    """The worker that the running leg waits for now."""
    prompt_logprobs: tuple[Token, ...] = ()
    abort_choice: Callable[[int], None] | None = None
    """Ends one choice where it runs now."""

    @property
    def may_fail_again(self) -> bool:
        return self.num_vain_failures < self.max_failures

    def count_failure(self) -> None:
        self.num_failures += 1
        self.num_vain_failures += 1
        self.num_tokens_of_leg = 0

    def leg(self) -> GenerationRequest:
        """The request as the next leg's workers get it now."""
        emitted = self.emitted[self.request.index] if self.has_emitted else []
        return replace(
            self.request,
            request_id=self._submission_id(),
            output_token_ids=self.request.output_token_ids + tuple(emitted),
            sampling=self._sampling(),
            deadline_s=self.deadline.remaining_s,
        )

    def offer(self, leg: GenerationRequest) -> GenerationRequest:
        """The leg's request as its next reader gets it now, whatever the client has by now."""
        return replace(leg, request_id=self._submission_id(), deadline_s=self.deadline.remaining_s)

    def _submission_id(self) -> RequestId:
        """One of its own after every failure, so that no worker takes it for one it still knows."""
        suffix = f".{self.num_failures}" if self.num_failures else ""
        return RequestId(self.request.request_id + suffix)

    def blame(self, error: SplitserveError) -> None:
        """Note who let the request down: the one that was waited for, and both ends of a bad transfer."""
        if self.current is not None:
            self.failed.add(self.current)
        is_owner = self.owner is not None and self.current == self.owner
        if isinstance(error, LeaseExpired) and self.owner is not None and self.owner not in self.failed:
            self.failed.add(self.owner)  # no more than that yet: a reader may have died with the ticket
        elif isinstance(error, TransferError) or (is_owner and not isinstance(error, Overloaded)):
            self._blame_owner()

    def _blame_owner(self) -> None:
        if self.owner is not None:
            self.failed.add(self.owner)
            self.failed_owners.add(self.owner)

    def _sampling(self) -> SamplingParams:
        sampling = self.request.sampling
        is_scored = self.has_emitted and sampling.prompt_logprobs is not None
        return replace(sampling, prompt_logprobs=None) if is_scored else sampling

    def settle_on(self, *workers: Worker) -> None:
        """They come to tokens or scores now. Only the first leg's count: later ones are their like."""
        self.contents = self.contents or frozenset(content_of(worker.fingerprint) for worker in workers)

    def note(self, delta: TokenDelta) -> None:
        """The client gets this delta now."""
        self.has_emitted = True
        self.num_tokens_of_leg += len(delta.tokens)
        if self.num_tokens_of_leg > self.request.n:  # so its decode worker came to some, too
            self.num_vain_failures = 0
        if delta.finish_reason is None:
            self.emitted[delta.index].extend(token.token_id for token in delta.tokens)
        else:
            del self.emitted[delta.index]

    def drop(self, index: int) -> None:
        """Nobody wants more of this choice."""
        if self.emitted.pop(index, None) is not None and self.abort_choice is not None:
            self.abort_choice(index)

    def alone(self, index: int) -> Run:
        """One choice of several as a request of its own."""
        request = self.request
        seed = choice_seed(request.sampling.seed, index)
        choice = replace(
            request,
            request_id=RequestId(f"{request.request_id}/{index}"),
            sampling=replace(request.sampling, seed=seed),
            n=1,
            index=index,
        )
        return replace(
            self,
            request=choice,
            emitted={index: list(self.emitted[index])},
            failed=set(self.failed),
            failed_owners=set(self.failed_owners),
        )


class Generation:
    """A request that runs: iterate over its deltas. The last one of each choice has a `finish_reason`."""

    def __init__(self, run: Run, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        self._run = run
        self._deltas = deltas

    @property
    def prompt_logprobs(self) -> tuple[Token, ...]:
        """What the request asked for, complete when the first delta is there."""
        return self._run.prompt_logprobs

    @property
    def current(self) -> WorkerIdentity | None:
        """The worker that is, or was at the end, waited for."""
        return self._run.current

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenDelta:
        """Raises `SplitserveError` only."""
        return await anext(self._deltas)

    def drop(self, index: int) -> None:
        """Abort one choice wherever it is, unless it has ended; no more of it comes. Idempotent."""
        self._run.drop(index)

    async def aclose(self) -> None:
        """Abort the request wherever it is. Idempotent."""
        await self._deltas.aclose()
