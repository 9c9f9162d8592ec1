"""An engine under any load, and the knowledge of what must come of it.

Every choice of every request must give the tokens of an undisturbed run, whatever else happens. Used by
the state machine (which shrinks), the long run (which is fast), and the planted bugs (which both must
find).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_fairness import Fairness
from engine_harness import EOS, Engine
from stamped_executor import Stamp, StampedExecutor

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import BlocksAllocated, FirstTokens, TokensSampled
from engine.roster import Roster
from protocol.errors import InvalidRequest, Overloaded
from protocol.generation import FinishReason, SamplingParams, choice_seed
from protocol.ids import SequenceId

VOCAB_SIZE = 12
MAX_MODEL_LEN = 30
BLOCK_SIZE = 4


@dataclass
class Choice:
    """What an undisturbed run gives to one choice."""

    sampling: SamplingParams
    tokens: list[int]
    """All that must still come."""
    reason: FinishReason
    first: int | None = None
    """Of a reserved one that goes on: what its prefill worker samples."""
    is_over: bool = False
    """Aborted or released: what came until then was right, and nothing more comes."""


@dataclass
class Request:
    prompt: list[int]
    """With the output of earlier legs."""
    choices: dict[int, Choice]
    salt: str
    started: int
    hold: bool = False
    is_reserved: bool = False
    num_given: int = 0


def _stops(sampling: SamplingParams) -> set[int]:
    return {*sampling.stop_token_ids} if sampling.ignore_eos else {*sampling.stop_token_ids, EOS}


def name_of(seq_id: str, index: int) -> str:
    return f"{seq_id}#{index}" if index else seq_id


class World:
    """Commands by number: `pick` chooses among those to which one may be given; none is fine, too."""

    def __init__(
        self,
        *,
        make_roster: Callable[[SchedulerConfig], Roster] = Roster,
        make_executor: Callable[..., StampedExecutor] = StampedExecutor,
        make_core: Callable[..., EngineCore] = EngineCore,
        **settings: object,
    ) -> None:
        defaults: dict[str, object] = {
            "num_blocks": 14, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 5, "max_num_waiting": 20,
            "max_num_batched_tokens": 9, "num_host_blocks": 9, "block_size": BLOCK_SIZE,
        }  # fmt: skip
        self.engine = Engine(
            VOCAB_SIZE,
            make_roster=make_roster,
            make_executor=make_executor,
            make_core=make_core,
            **{**defaults, **settings},
        )
        executor = self.engine.executor
        assert isinstance(executor, StampedExecutor)
        self.executor = executor
        self.fairness = Fairness(self.engine)
        executor.on_plan = self.fairness.look_at
        self.requests: dict[str, Request] = {}
        self._told: set[SequenceId] = set()
        self.invalidations: list[tuple[int, list[int], str | None]] = []
        self.num_requests = 0
        self.num_steps = 0

    # ---- Requests ----

    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        hold: bool = False,
        num_given: int = 0,
        salt: str = "",
        priority: int = 0,
    ) -> None:
        seq_id, whole = self._new_id(), self._undisturbed(prompt, sampling)[0]
        given = tuple(whole[: min(num_given, len(whole) - 1)]) if n == 1 else ()
        choices = {}
        for i in range(n):
            own = replace(sampling, seed=choice_seed(sampling.seed, i))
            tokens, reason = self._undisturbed(prompt, own)
            rest = tokens[len(given) :]
            choices[i] = Choice(own, rest[:1] if hold else rest, reason)
        self._note(seq_id, Request([*prompt, *given], choices, salt, self.executor.now, hold))
        refused = self.fairness.who_is_refused(seq_id, priority) if not given else None
        self.engine.add(
            seq_id, prompt, sampling, output=given, hold=hold, salt=salt, n=n, priority=priority
        )
        self._forget_refused(refused)

    def reserve(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        num_given: int = 0,
        salt: str = "",
        priority: int = 0,
    ) -> None:
        """A prefill worker computes meanwhile; each choice's first token is its, and may be the last."""
        seq_id, whole = self._new_id(), self._undisturbed(prompt, sampling)[0]
        given = tuple(whole[: min(num_given, len(whole) - 1)]) if n == 1 else ()
        choices = {}
        for i in range(n):
            own = replace(sampling, seed=choice_seed(sampling.seed, i))
            tokens, reason = self._undisturbed(prompt, own)
            first, *rest = tokens[len(given) :]
            choices[i] = Choice(own, rest, reason, first if rest else None, is_over=not rest)
        request = Request(
            [*prompt, *given], choices, salt, self.executor.now, is_reserved=True, num_given=len(given)
        )
        self._note(seq_id, request)
        self.engine.reserve(seq_id, prompt, sampling, output=given, n=n, cache_salt=salt, priority=priority)
        self._forget_refused(None)

    def fetch(self, pick: int, *, good: bool = True) -> None:
        """A remote read ends: with the KV, or with garbage and a local recompute."""
        if (seq_id := self._choose(self._fetching(), pick)) is None:
            return
        request = self.requests[seq_id]
        request.is_reserved = False
        if not good:
            self._fill(seq_id, [7] * len(request.prompt), "garbage")
            self.engine.recompute(seq_id, self._first_tokens(seq_id))
            return
        self._fill(seq_id, request.prompt, request.salt)
        self.engine.admit(seq_id, self._first_tokens(seq_id))

    def fetch_without_verdict(self, pick: int) -> None:
        """The KV is there, but nobody has vouched for it: the blocks may not be touched meanwhile."""
        if (seq_id := self._choose(self._fetching(), pick)) is not None:
            self._fill(seq_id, self.requests[seq_id].prompt, self.requests[seq_id].salt)

    def recompute(self, pick: int) -> None:
        if (seq_id := self._choose(self._reserved(), pick)) is not None:
            self.requests[seq_id].is_reserved = False
            self.engine.recompute(seq_id, self._first_tokens(seq_id))

    def go_astray(self, pick: int, *, admits: bool, ends: bool) -> None:
        """First tokens come that can't be: one of no choice, or one that ends its choice."""
        seq_ids = self._fetching() if admits else self._reserved()
        if (seq_id := self._choose(seq_ids, pick)) is None:
            return
        wrong = (ends and self._last_token(seq_id)) or (len(self.requests[seq_id].choices), 1)
        others = [pair for pair in self._first_tokens(seq_id) if pair[0] != wrong[0]]
        (self.engine.admit if admits else self.engine.recompute)(seq_id, (*others, wrong))
        assert isinstance(self.engine.failed.pop(seq_id), InvalidRequest)
        self._end(seq_id)

    def release(self, pick: int) -> None:
        """A held prompt was read by its decode worker."""
        if (seq_id := self._choose(self._held(), pick)) is None:
            return
        request = self.requests[seq_id]
        assert self.engine.progress[seq_id][-1] == len(request.prompt)
        self._verify_progress(seq_id)
        self.engine.release(seq_id)
        self._end(seq_id)

    def abort(self, pick: int) -> None:
        if (seq_id := self._choose(list(self._live()), pick)) is not None:
            self.engine.abort(seq_id)
            self._end(seq_id)

    def abort_choice(self, pick: int, index: int) -> None:
        if (seq_id := self._choose(list(self._live()), pick)) is not None:
            choices = list(self.requests[seq_id].choices.items())
            index, choice = choices[index % len(choices)]
            self.engine.abort(seq_id, index)
            choice.is_over = choice.is_over or name_of(seq_id, index) not in self.engine.finished

    def invalidate(self, head: list[int] | None, salt: str | None) -> None:
        self.engine.invalidate(head, salt)
        self.executor.now += 1
        self.invalidations.append((self.executor.now, head or [], salt))

    # ---- Steps ----

    def step(self) -> None:
        num_plans = len(self.executor.plans)
        had_work = self.engine.core.has_work
        self.fairness.before_step()
        for event in self.engine.step(on_allocated=self._use_at_once):
            if isinstance(event, TokensSampled):
                self._check_cached(event)
        for seq_id, request in self._live().items():
            # One that starts over after an invalidation has no blocks; its reader hears of the new ones.
            if request.hold and self.engine.roster.groups[SequenceId(seq_id)][0].block_table:
                self._verify_progress(seq_id)
        self.executor.now += 1
        self.num_steps += 1
        is_idle = len(self.executor.plans) == num_plans
        waits_for_others = self._held() or self._fetching()  # the step may have given blocks to fill
        assert not (had_work and is_idle) or waits_for_others, "live sequences, and nothing is done"
        del self.executor.plans[:-1], self.engine.events[:]

    def check(self) -> None:
        """All tokens so far are right."""
        for seq_id, request in self.requests.items():
            for index, choice in request.choices.items():
                tokens = self.engine.tokens.get(name_of(seq_id, index), [])
                assert tokens == choice.tokens[: len(tokens)], f"{seq_id}#{index} went astray"
                reason = self.engine.finished.get(name_of(seq_id, index))
                assert reason in (None, choice.reason)
                assert reason is None or tokens == choice.tokens

    def finish(self) -> None:
        """Without new load all that lives ends within as many steps as tokens are to be computed."""
        bound = 10 + 2 * sum(
            (len(request.prompt) + len(choice.tokens) + 1)
            for request in self._live().values()
            for choice in request.choices.values()
        )
        for _ in range(bound):
            while self._fetching():
                self.fetch(0)
            while self._held():
                self.release(0)
            if not self.engine.core.live_sequence_ids:
                break
            self.step()
        self.check()
        for seq_id, request in self.requests.items():
            for index, choice in request.choices.items():
                if not choice.is_over:
                    tokens = self.engine.tokens.get(name_of(seq_id, index), [])
                    assert tokens == choice.tokens, f"{seq_id}#{index} was not served to its end"
        self.engine.core.assert_idle()

    def forget_ended(self) -> None:
        """Keep a long run short of memory and time: what ended was checked."""
        self.check()
        live = {*self.engine.core.live_sequence_ids}
        for seq_id in [seq_id for seq_id in self.requests if seq_id not in live]:
            request = self.requests.pop(seq_id)
            for index, choice in request.choices.items():
                name = name_of(seq_id, index)
                tokens = self.engine.tokens.pop(name, [])
                assert choice.is_over or tokens == choice.tokens, f"{name} was not served to its end"
                self.engine.finished.pop(name, None)
            self.engine.allocated.pop(seq_id, None)
            self.engine.progress.pop(seq_id, None)
            for index in request.choices:
                self.executor.computed.pop((SequenceId(seq_id), index), None)

    # ---- Helpers ----

    def _new_id(self) -> str:
        self.num_requests += 1
        return f"s{self.num_requests}"

    def _note(self, seq_id: str, request: Request) -> None:
        self.requests[seq_id] = request
        for since, head, salt in self.invalidations:
            if salt in (None, request.salt) and request.prompt[: len(head)] == head:
                self.executor.not_before[SequenceId(seq_id)] = since

    def _forget_refused(self, expected: str | None) -> None:
        assert [*self.engine.failed] == ([expected] if expected else []), f"{expected} should be refused"
        for seq_id, error in self.engine.failed.items():
            assert isinstance(error, Overloaded)
            del self.requests[seq_id]
        self.engine.failed.clear()

    def _use_at_once(self, allocated: BlocksAllocated) -> None:
        """A reader reads what is ready, or the first bytes of a read come; whatever the device does yet."""
        request = self.requests[allocated.seq_id]
        if request.hold:
            self._verify_progress(allocated.seq_id)
        else:
            self._fill(allocated.seq_id, [7] * len(request.prompt), "garbage")

    def _check_cached(self, event: TokensSampled) -> None:
        """At a request's first token: what was computed here was not given by the cache."""
        if event.seq_id not in self._told:
            self._told.add(event.seq_id)
            computed = self.executor.computed.get((event.seq_id, event.index), set())
            assert computed.isdisjoint(range(event.num_cached_tokens)), "too many hits are told"

    def _end(self, seq_id: str) -> None:
        for choice in self.requests[seq_id].choices.values():
            choice.is_over = True

    def _first_tokens(self, seq_id: str) -> FirstTokens:
        """Of those that go on; the sender may not know yet that one was aborted."""
        choices = self.requests[seq_id].choices
        return tuple((i, choice.first) for i, choice in choices.items() if choice.first is not None)

    def _last_token(self, seq_id: str) -> tuple[int, int] | None:
        """A choice that goes on, and a first token with which it would not; None when there is none."""
        for index, choice in self.requests[seq_id].choices.items():
            sampling, num_output = choice.sampling, self.requests[seq_id].num_given + 1
            if not choice.is_over and num_output >= sampling.min_tokens:
                return next(((index, stop) for stop in _stops(sampling)), None)
        return None

    def _verify_progress(self, seq_id: str) -> None:
        """A reader may take at once what is told to be there, while the rest is computed."""
        allocated = self.engine.allocated[seq_id]
        num_ready = self.engine.progress.get(seq_id, [allocated.num_cached_tokens])[-1]
        self.executor.verify(allocated.block_ids, self.requests[seq_id].prompt, num_ready)

    def _undisturbed(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        tokens, output = list(prompt), []
        stops = _stops(sampling)
        while True:
            tokens.append(self.executor.next_token(tokens, sampling.seed))
            output = tokens[len(prompt) :]
            if len(output) >= sampling.min_tokens and output[-1] in stops:
                return output, FinishReason.STOP
            if len(output) == sampling.max_tokens or len(tokens) == MAX_MODEL_LEN:
                return output, FinishReason.LENGTH

    def _fill(self, seq_id: str, prompt: list[int], salt: str) -> None:
        """Write what a fetch brings: all tokens past the cached prefix."""
        allocated, request = self.engine.allocated[seq_id], self.requests[seq_id]
        start, stop = allocated.num_cached_tokens, len(prompt)
        self.executor.write(allocated.block_ids, prompt, start, stop)
        self.executor.stamp(allocated.block_ids, start, stop, Stamp(request.started, salt))

    def _live(self) -> dict[str, Request]:
        return {seq_id: self.requests[seq_id] for seq_id in self.engine.core.live_sequence_ids}

    def _reserved(self) -> list[str]:
        return [seq_id for seq_id, request in self._live().items() if request.is_reserved]

    def _fetching(self) -> list[str]:
        return [seq_id for seq_id in self._reserved() if seq_id in self.engine.allocated]

    def _held(self) -> list[str]:
        return [
            seq_id
            for seq_id, request in self._live().items()
            if request.hold and any(name_of(seq_id, i) in self.engine.tokens for i in request.choices)
        ]

    @staticmethod
    def _choose(seq_ids: list[str], pick: int) -> str | None:
        return sorted(seq_ids)[pick % len(seq_ids)] if seq_ids else None
