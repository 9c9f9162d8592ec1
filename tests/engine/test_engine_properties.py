"""Whatever is asked of the engine in whatever order, every sequence gets the tokens of an undisturbed run.

The fake device checks every KV slot that is read, so a wrong table, a block with two owners or a
stale cache entry fails here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_harness import EOS, Engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.messages import TokensSampled
from protocol.generation import FinishReason, SamplingParams

VOCAB_SIZE = 12
# Few different heads, so that prefixes are shared, and tails of all lengths around block boundaries.
PROMPTS = st.builds(
    lambda head, tail: head * 4 + tail,
    st.sampled_from([[1, 2], [3, 1], [2, 2]]),
    st.lists(st.integers(1, 3), max_size=7),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 14),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (5,)]),
)
PICK = st.integers(0, 1000)


@dataclass
class Expectation:
    """What one sequence was asked for, and all tokens that an undisturbed run gives after its input."""

    prompt: list[int]
    given: tuple[int, ...]
    sampling: SamplingParams
    tokens: list[int]
    reason: FinishReason
    hold: bool = False


class AnyOrder(RuleBasedStateMachine):
    """Commands in any order against a small pool; `in_state` says who may get which."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            vocab_size=VOCAB_SIZE, num_blocks=14, max_model_len=30, max_num_seqs=4, max_num_batched_tokens=9
        )
        self.expected: dict[str, Expectation] = {}
        self.reserved: set[str] = set()
        self.held: set[str] = set()
        self.gone: set[str] = set()
        self.num_sequences = 0

    # ---- Commands ----

    @rule(prompt=PROMPTS, sampling=SAMPLING, hold=st.booleans(), num_given=st.integers(0, 3))
    def add(self, prompt: list[int], sampling: SamplingParams, hold: bool, num_given: int) -> None:
        seq_id, given = self._expect(prompt, sampling, num_given, hold)
        self.engine.add(seq_id, prompt, sampling, output=given, hold=hold)

    @rule(prompt=PROMPTS, sampling=SAMPLING, num_given=st.integers(1, 3))
    def reserve(self, prompt: list[int], sampling: SamplingParams, num_given: int) -> None:
        seq_id, given = self._expect(prompt, sampling, num_given, hold=False)
        if not given:  # its first token ends it: a prefill worker would not pass it on
            del self.expected[seq_id]
            return
        self.engine.reserve(seq_id, prompt, given, sampling)
        self.reserved.add(seq_id)

    @precondition(lambda self: self._fetching())
    @rule(pick=PICK)
    def fetch_and_admit(self, pick: int) -> None:
        seq_id = self._choose(self._fetching(), pick)
        self._fill(seq_id)
        self.engine.admit(seq_id)
        self.reserved.discard(seq_id)

    @precondition(lambda self: self._fetching())
    @rule(pick=PICK)
    def fetch_and_wait(self, pick: int) -> None:
        """The KV is there, but its verdict is not: nobody may touch the blocks meanwhile."""
        self._fill(self._choose(self._fetching(), pick))

    @precondition(lambda self: self._fetching())
    @rule(pick=PICK)
    def fetch_garbage_and_recompute(self, pick: int) -> None:
        seq_id = self._choose(self._fetching(), pick)
        tokens = [7] * len(self._input(seq_id)[:-1])
        self.engine.fill(seq_id, tokens)
        self.engine.recompute(seq_id)
        self.reserved.discard(seq_id)

    @precondition(lambda self: self.reserved)
    @rule(pick=PICK)
    def recompute(self, pick: int) -> None:
        seq_id = self._choose(self.reserved, pick)
        self.engine.recompute(seq_id)
        self.reserved.discard(seq_id)

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def read_and_release(self, pick: int) -> None:
        seq_id = self._choose(self.held, pick)
        source = self._input(seq_id)
        self.engine.executor.verify(self.engine.allocated[seq_id].block_ids, source, len(source))
        self.engine.release(seq_id)
        self.held.discard(seq_id)
        self.gone.add(seq_id)

    @precondition(lambda self: self.engine.core.live_sequence_ids)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        seq_id = self._choose(set(self.engine.core.live_sequence_ids), pick)
        self.engine.abort(seq_id)
        self.held.discard(seq_id)
        self.reserved.discard(seq_id)
        self.gone.add(seq_id)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for event in self.engine.step():
                self._check(event)

    # ---- What must hold ----

    @invariant()
    def tokens_are_those_of_an_undisturbed_run(self) -> None:
        for seq_id, tokens in self.engine.tokens.items():
            assert tokens == self.expected[seq_id].tokens[: len(tokens)]

    def teardown(self) -> None:
        """Everything that is left comes to its end, in a bounded number of steps, and nothing leaks."""
        for _ in range(100):
            for seq_id in sorted(self._fetching()):
                self.fetch_and_admit(sorted(self._fetching()).index(seq_id))
            while self.held:
                self.read_and_release(0)
            if not self.engine.core.live_sequence_ids:
                break
            self.step(5)
        for seq_id, expected in self.expected.items():
            if seq_id not in self.gone:
                assert self.engine.tokens[seq_id] == expected.tokens
                assert self.engine.finished[seq_id] is expected.reason
        assert not self.engine.failed
        self.engine.core.assert_idle()

    # ---- Helpers ----

    def _expect(
        self, prompt: list[int], sampling: SamplingParams, num_given: int, hold: bool
    ) -> tuple[str, tuple[int, ...]]:
        """Note what a new sequence will give, when it starts after `num_given` tokens of its output."""
        whole, reason = self._undisturbed(prompt, sampling)
        given = tuple(whole[: min(num_given, len(whole) - 1)])
        rest = whole[len(given) :]
        seq_id = f"s{self.num_sequences}"
        self.num_sequences += 1
        self.expected[seq_id] = Expectation(
            prompt, given, sampling, rest[:1] if hold else rest, reason, hold
        )
        return seq_id, given

    def _undisturbed(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        tokens = list(prompt)
        stops = {*sampling.stop_token_ids} if sampling.ignore_eos else {*sampling.stop_token_ids, EOS}
        while True:
            tokens.append(self.engine.executor.next_token(tokens))
            output = tokens[len(prompt) :]
            if len(output) >= sampling.min_tokens and output[-1] in stops:
                return output, FinishReason.STOP
            if len(output) == sampling.max_tokens or len(tokens) == self.engine.config.max_model_len:
                return output, FinishReason.LENGTH

    def _check(self, event: object) -> None:
        if isinstance(event, TokensSampled) and event.finish_reason is None:
            expected = self.expected[event.seq_id]
            if expected.hold:
                self.held.add(event.seq_id)

    def _fetching(self) -> set[str]:
        return {seq_id for seq_id in self.reserved if seq_id in self.engine.allocated}

    def _input(self, seq_id: str) -> list[int]:
        return [*self.expected[seq_id].prompt, *self.expected[seq_id].given]

    def _fill(self, seq_id: str) -> None:
        self.engine.fill(seq_id, self._input(seq_id)[:-1])

    @staticmethod
    def _choose(seq_ids: set[str], pick: int) -> str:
        ordered = sorted(seq_ids)
        return ordered[pick % len(ordered)]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
