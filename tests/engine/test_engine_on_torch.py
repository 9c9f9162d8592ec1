"""The whole engine on a real model: memory pressure, shared blocks and stale bytes change no output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tiny_models import BLOCK_SIZE, CPU, VOCAB_SIZE, Twins, make_prompt, make_twins

from engine import (
    AddSequence,
    AdmitSequence,
    BlocksAllocated,
    EngineCore,
    Event,
    PrefillProgressed,
    PromptScored,
    RecomputeSequence,
    ReleaseSequence,
    ReserveSequence,
    SchedulerConfig,
    SequenceFailed,
    TokensSampled,
)
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache
from engine.runner import ModelRunner
from protocol.generation import SamplingParams, Token, choice_seed
from protocol.ids import SequenceId

Outputs = dict[tuple[str, int], list[Token]]


@cache
def twins() -> Twins:
    return make_twins("smollm2")


def make_kv_cache(num_blocks: int) -> KvCache:
    kv_cache = KvCache(
        twins().config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=twins().model.dtype, device=CPU
    )
    kv_cache.blocks.fill_(float("nan"))
    return kv_cache


def make_core(
    num_blocks: int, num_host_blocks: int = 0, kv_cache: KvCache | None = None, **settings: Any
) -> EngineCore:
    """Both memories start full of NaN."""
    kv_cache = kv_cache or make_kv_cache(num_blocks)
    pool = HostKvPool(kv_cache, num_host_blocks) if num_host_blocks else None
    if pool is not None:
        pool.blocks.fill_(float("nan"))
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=200,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        low_watermark=0.0,
        high_watermark=0.0,
        **settings,
    )
    return EngineCore(config, ModelRunner(twins().model, kv_cache, (2,), pool), frozenset([2]), lambda: 0.0)


LOADS: list[tuple[int, int, int, dict[str, Any]]] = [  # prompt length, max_tokens, choices, parameters
    (30, 40, 1, {"logprobs": 2, "repetition_penalty": 1.2}),
    (50, 30, 3, {"frequency_penalty": 0.5, "bad_words": ((7,), (8, 9))}),
    (16, 60, 1, {"top_p": 0.9, "min_tokens": 20, "logit_bias": ((5, 2.0),)}),
    (70, 20, 2, {"prompt_logprobs": 2, "logprobs": 0}),
    (9, 50, 4, {"top_k": 50, "presence_penalty": 0.3}),
]
REQUESTS = [
    AddSequence(
        SequenceId(f"s{i}"),
        tuple(make_prompt(length)),
        SamplingParams(
            max_tokens=max_tokens, seed=choice_seed(5, i), temperature=0.9, ignore_eos=True, **more
        ),
        num_samples=num_samples,
    )
    for i, (length, max_tokens, num_samples, more) in enumerate(LOADS)
]


def run(core: EngineCore, requests: list[AddSequence]) -> tuple[Outputs, dict[str, list[Token]]]:
    """(output by sequence and choice, prompt scores by sequence)."""
    outputs: Outputs = defaultdict(list)
    scores: dict[str, list[Token]] = defaultdict(list)
    events = [event for request in requests for event in core.handle(request)]
    for _ in range(2000):
        for event in events:
            assert not isinstance(event, SequenceFailed), event
            if isinstance(event, TokensSampled):
                outputs[event.seq_id, event.index] += event.tokens
            elif isinstance(event, PromptScored):
                scores[event.seq_id] += event.tokens
        if not core.has_work:
            core.assert_idle()
            return dict(outputs), dict(scores)
        events = core.step()
    raise AssertionError("the engine does not come to an end")


@cache
def undisturbed() -> tuple[Outputs, dict[str, list[Token]]]:
    """Every choice alone, in an engine with room for all."""
    outputs: Outputs = {}
    scores: dict[str, list[Token]] = {}
    for request in REQUESTS:
        for index in range(request.num_samples):
            core = make_core(60, enable_prefix_caching=False)
            params = {name: getattr(request.sampling, name) for name in SamplingParams.__dataclass_fields__}
            params["seed"] = choice_seed(request.sampling.seed, index)
            alone = AddSequence(request.seq_id, request.prompt_token_ids, SamplingParams(**params))
            found, scored = run(core, [alone])
            outputs[request.seq_id, index] = found[request.seq_id, 0]
            scores |= scored
    return outputs, scores


def test_choices_and_scores_of_a_roomy_engine_are_those_of_each_alone() -> None:
    outputs, scores = run(make_core(200), REQUESTS)
    assert (outputs, scores) == undisturbed()
    prompt = list(REQUESTS[3].prompt_token_ids)
    assert [token.token_id for token in scores["s3"]] == prompt[1:]
    assert all(0 <= token.token_id < VOCAB_SIZE for tokens in outputs.values() for token in tokens)


@pytest.mark.parametrize("num_host_blocks", [0, 5, 40])
def test_preemption_changes_no_token_of_anybody(num_host_blocks: int) -> None:
    core = make_core(
        14, num_host_blocks, preemption="swap" if num_host_blocks else "recompute", policy="fcfs"
    )
    assert run(core, REQUESTS) == undisturbed()
    stats = core.stats()
    if num_host_blocks:
        assert stats.num_preemptions_swap > 0
    else:
        assert stats.num_preemptions_recompute > 0


# Hand-off


class Handoff:
    """One engine computes prompts and holds them, another one reads each chunk as it comes, and decodes."""

    def __init__(self, num_blocks: int, recomputed: Collection[str], **settings: Any) -> None:
        self._recomputed = recomputed
        self._owner_kv, self._reader_kv = make_kv_cache(60), make_kv_cache(num_blocks)
        self.owner = make_core(60, kv_cache=self._owner_kv)
        self.reader = make_core(num_blocks, kv_cache=self._reader_kv, **settings)
        self._requests = {request.seq_id: request for request in REQUESTS}
        self._tickets: dict[str, BlocksAllocated] = {}
        self._num_ready: dict[str, int] = {}
        self._reserved: dict[str, BlocksAllocated] = {}
        self._num_read: dict[str, int] = {}
        self.outputs: Outputs = defaultdict(list)

    def run(self) -> None:
        self._tickets.clear()
        self._reserved.clear()
        for request in self._requests.values():
            self._note_owner(self.owner.handle(replace(request, hold=True)))
            reserve = ReserveSequence(
                request.seq_id,
                request.prompt_token_ids,
                request.sampling,
                num_samples=request.num_samples,
            )
            self._note_reader(self.reader.handle(reserve))
        for _ in range(2000):
            if not self.owner.live_sequence_ids and not self.reader.live_sequence_ids:
                break
            self._note_owner(self.owner.step())
            self._note_reader(self.reader.step())
            for seq_id in self.owner.live_sequence_ids:
                self._read(seq_id)
        self.owner.assert_idle()
        self.reader.assert_idle()

    def _note_owner(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksAllocated):
                self._tickets[event.seq_id] = event
                self._num_ready[event.seq_id] = event.num_cached_tokens
            elif isinstance(event, PrefillProgressed):
                self._num_ready[event.seq_id] = event.num_computed
            elif isinstance(event, TokensSampled):
                self.outputs[event.seq_id, event.index] += event.tokens

    def _note_reader(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, SequenceFailed | PromptScored), event
            if isinstance(event, BlocksAllocated):
                self._reserved[event.seq_id] = event
                self._num_read[event.seq_id] = event.num_cached_tokens // BLOCK_SIZE
            elif isinstance(event, TokensSampled):
                self.outputs[event.seq_id, event.index] += event.tokens

    def _read(self, seq_id: SequenceId) -> None:
        """Full blocks as they get ready, the last one when all is; then the reader goes on."""
        request = self._requests[seq_id]
        if seq_id not in self._reserved or seq_id not in self._tickets:
            return
        num_tokens = len(request.prompt_token_ids)
        is_whole = self._num_ready[seq_id] == num_tokens
        num_blocks = -(-num_tokens // BLOCK_SIZE) if is_whole else self._num_ready[seq_id] // BLOCK_SIZE
        new = slice(self._num_read[seq_id], num_blocks)
        if seq_id not in self._recomputed:
            source, target = self._tickets[seq_id].block_ids[new], self._reserved[seq_id].block_ids[new]
            self._reader_kv.blocks[list(target)] = self._owner_kv.blocks[list(source)]
        self._num_read[seq_id] = num_blocks
        if is_whole:
            self._go_on(request)

    def _go_on(self, request: AddSequence) -> None:
        firsts = [(i, self.outputs[request.seq_id, i][0].token_id) for i in range(request.num_samples)]
        command = RecomputeSequence if request.seq_id in self._recomputed else AdmitSequence
        self._note_reader(self.reader.handle(command(request.seq_id, tuple(firsts))))
        self.owner.handle(ReleaseSequence(request.seq_id))


@pytest.mark.parametrize("num_blocks", [100, 16])
@pytest.mark.parametrize("recomputed", [(), ("s1", "s4"), tuple(request.seq_id for request in REQUESTS)])
def test_a_handed_over_request_gives_the_tokens_of_one_that_stays(
    num_blocks: int, recomputed: tuple[str, ...]
) -> None:
    """Chunk by chunk, several choices or one, into a roomy pool and into one that preempts."""
    handoff = Handoff(num_blocks, recomputed)
    handoff.run()
    assert handoff.outputs == undisturbed()[0]
    stats = handoff.reader.stats()
    assert (stats.num_preemptions > 0) == (num_blocks == 16)
    assert (stats.prompt_tokens_transferred > 0) == (len(recomputed) < len(REQUESTS))


def test_what_the_reader_has_in_its_cache_is_not_read_again_and_changes_no_token() -> None:
    """One of the prompts fills its blocks: nothing of it is left to read."""
    handoff = Handoff(100, ())
    handoff.run()
    first = handoff.reader.stats()
    handoff.outputs.clear()
    handoff.run()
    assert handoff.outputs == undisturbed()[0]
    second = handoff.reader.stats()
    lengths = [len(request.prompt_token_ids) for request in REQUESTS]
    assert first.prompt_tokens_transferred == sum(lengths)
    assert second.prompt_tokens_transferred - sum(lengths) == sum(n % BLOCK_SIZE for n in lengths)
    assert second.prompt_tokens_computed == 0
