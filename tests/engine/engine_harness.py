"""An engine core on a checking fake device, with short ways to say what tests say often."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.fake_executor import FakeExecutor
from engine.messages import (
    AbortSequence,
    AddSequence,
    AdmitSequence,
    BlocksAllocated,
    Command,
    Event,
    FirstTokens,
    InvalidateCache,
    PrefillProgressed,
    PromptScored,
    RecomputeSequence,
    ReleaseSequence,
    ReserveSequence,
    SequenceFailed,
    TokensSampled,
)
from engine.roster import Roster
from protocol.errors import SplitserveError
from protocol.generation import FinishReason, SamplingParams
from protocol.ids import SequenceId

EOS = 0


def greedy(max_tokens: int = 8, *, ignore_eos: bool = True, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, **more)  # type: ignore[arg-type]


def first_tokens(first: int | FirstTokens) -> FirstTokens:
    return ((0, first),) if isinstance(first, int) else first


class Engine:
    """Collects events by sequence and checks the core after every call."""

    def __init__(
        self,
        vocab_size: int = 50,
        *,
        make_executor: Callable[..., FakeExecutor] = FakeExecutor,
        make_roster: Callable[[SchedulerConfig], Roster] = Roster,
        make_core: Callable[..., EngineCore] = EngineCore,
        **settings: object,
    ) -> None:
        defaults: dict[str, object] = {
            "num_blocks": 65, "max_model_len": 200, "block_size": 4, "max_num_seqs": 8,
            "max_num_batched_tokens": 32, "low_watermark": 0.0, "high_watermark": 0.0,
        }  # fmt: skip
        self.config = SchedulerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.executor = make_executor(self.config.block_size, vocab_size)
        self.now_s = 0.0
        self.roster = make_roster(self.config)
        self.core = make_core(self.config, self.executor, frozenset([EOS]), self._tick, self.roster)
        self.events: list[Event] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.failed: dict[str, SplitserveError] = {}
        self.allocated: dict[str, BlocksAllocated] = {}
        self.progress: dict[str, list[int]] = {}
        self.was_invalidated = False
        self.num_invalidations = 0
        self.scores: dict[str, list[float | None]] = {}

    # ---- Commands ----

    def add(
        self,
        seq_id: str,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        *,
        output: tuple[int, ...] = (),
        hold: bool = False,
        salt: str = "",
        n: int = 1,
        priority: int = 0,
    ) -> list[Event]:
        command = AddSequence(
            SequenceId(seq_id),
            tuple(prompt),
            sampling or greedy(),
            output,
            hold=hold,
            cache_salt=salt,
            num_samples=n,
            priority=priority,
        )
        return self.handle(command)

    def reserve(
        self,
        seq_id: str,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        *,
        output: tuple[int, ...] = (),
        n: int = 1,
        **more: object,
    ) -> list[Event]:
        command = ReserveSequence(
            SequenceId(seq_id), tuple(prompt), sampling or greedy(), output, num_samples=n, **more
        )  # type: ignore[arg-type]
        return self.handle(command)

    def admit(self, seq_id: str, first: int | FirstTokens) -> list[Event]:
        """`first`: that of choice 0, or of several."""
        return self.handle(AdmitSequence(SequenceId(seq_id), first_tokens(first)))

    def recompute(self, seq_id: str, first: int | FirstTokens) -> list[Event]:
        return self.handle(RecomputeSequence(SequenceId(seq_id), first_tokens(first)))

    def abort(self, seq_id: str, index: int | None = None) -> list[Event]:
        return self.handle(AbortSequence(SequenceId(seq_id), index))

    def invalidate(self, token_ids: list[int] | None = None, salt: str | None = None) -> list[Event]:
        self.was_invalidated = True
        self.num_invalidations += 1
        seq_id = SequenceId(f"invalidation {self.num_invalidations}")
        return self.handle(InvalidateCache(seq_id, None if token_ids is None else tuple(token_ids), salt))

    def release(self, seq_id: str) -> list[Event]:
        return self.handle(ReleaseSequence(SequenceId(seq_id)))

    def handle(self, command: Command) -> list[Event]:
        return self._record(self.core.handle(command))

    # ---- Steps ----

    def step(self, on_allocated: Callable[[BlocksAllocated], None] | None = None) -> list[Event]:
        """`on_allocated` is called when blocks are told, which may be before the device starts."""
        if on_allocated is None:
            return self._record(self.core.step())

        def tell(events: list[Event]) -> None:
            for event in events:
                self._note(event)
                assert isinstance(event, BlocksAllocated)
                on_allocated(event)

        return self._record(self.core.step(announce=tell))

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to do; a live-lock fails."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    @property
    def last_plan(self) -> list[tuple[str, int]]:
        return self.executor.plans[-1]

    def expected(
        self, prompt: list[int], num_tokens: int, output: tuple[int, ...] = (), seed: int = 0
    ) -> list[int]:
        """What an undisturbed run generates after `prompt` and `output`."""
        tokens = [*prompt, *output]
        for _ in range(num_tokens):
            tokens.append(self.executor.next_token(tokens, seed))
        return tokens[len(prompt) + len(output) :]

    def first(self, prompt: list[int], seed: int = 0) -> int:
        """The token that a prefill worker samples."""
        return self.expected(prompt, 1, seed=seed)[0]

    def fill(self, seq_id: str, token_ids: list[int]) -> None:
        """Write a reserved sequence's blocks past the cached prefix, as a fetch would."""
        allocated = self.allocated[seq_id]
        self.executor.write(allocated.block_ids, token_ids, allocated.num_cached_tokens, len(token_ids))

    def _tick(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def _record(self, events: list[Event]) -> list[Event]:
        self.core.check_integrity()
        for event in events:
            self._note(event)
        self.events += events
        return events

    def _note(self, event: Event) -> None:
        """A further choice is noted under `seq_id#index`."""
        seq_id: str = event.seq_id
        if isinstance(event, TokensSampled) and event.index:
            seq_id = f"{seq_id}#{event.index}"
        assert seq_id not in self.finished, f"an event after the end of {seq_id}"
        assert seq_id not in self.failed, f"an event after the failure of {seq_id}"
        match event:
            case BlocksAllocated():
                assert seq_id not in self.allocated or self.was_invalidated  # then it starts over
                assert seq_id not in self.tokens
                self.allocated[seq_id] = event
                self.progress.pop(seq_id, None)
            case PrefillProgressed(num_computed=num_computed):
                assert seq_id in self.allocated
                assert seq_id not in self.tokens, "progress after the first token"
                self.progress.setdefault(seq_id, []).append(num_computed)
            case PromptScored(tokens=tokens):
                assert seq_id not in self.tokens, "scored after the first token"
                self.scores.setdefault(seq_id, []).extend(token.logprob for token in tokens)
            case TokensSampled(tokens=tokens, finish_reason=reason):
                self.tokens.setdefault(seq_id, []).extend(token.token_id for token in tokens)
                if reason is not None:
                    self.finished[seq_id] = reason
            case SequenceFailed(error=error):
                self.failed[seq_id] = error
