"""Several ranks give the tokens of one: all families, uneven heads, chunks, swaps and scored prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_variants import best_ops
from parity_kit import FEW_LAYERS, cpp_ops, generate_some, require_parity, token_ids
from rank_groups import lead_ranks
from rank_threads import run_groups
from tiny_models import BlockDealer, generate, make_prompt
from tiny_shards import load_rank, write_model

from engine import AddSequence, EngineCore, Executor, PromptScored, SchedulerConfig, TokensSampled
from engine.model import ModelConfig
from engine.parallel import shard_of
from engine.weights import demo_model_path, resolve_model
from protocol.generation import SamplingParams, Token
from protocol.ids import SequenceId
from protocol.rank_layout import RankLayout

SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, **FEW_LAYERS}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "kind",
    ["llama_biased", "mistral_sliding", "qwen2", "qwen3_tied", "multi_head", "one_kv_head"],
)
def test_ranks_give_the_tokens_of_one(kind: str, num_ranks: int, tmp_path: Path) -> None:
    require_parity(write_model(kind, tmp_path, **FEW_LAYERS), RankLayout(num_ranks), tmp_path)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_heads_of_smollm2_are_split_and_give_the_same_tokens(num_ranks: int, tmp_path: Path) -> None:
    require_parity(write_model("smollm2", tmp_path, **SMOLLM2), RankLayout(num_ranks), tmp_path)


@pytest.mark.parametrize("layout", [RankLayout(2), RankLayout(2, 2)], ids=["one_stage", "two_stages"])
def test_ranks_with_cpp_ops_give_the_same_tokens_and_keep_a_file_of_packed_weights_each(
    layout: RankLayout, tmp_path: Path
) -> None:
    best_ops(torch.float32)  # skips where there are none
    folder = write_model("qwen2", tmp_path, **FEW_LAYERS)
    alone = generate_some(load_rank(folder, None, tmp_path).runner)
    for _ in range(2):  # packs, then maps what was packed
        together = lead_ranks(folder, layout, tmp_path, generate_some, make_ops=cpp_ops)
        assert token_ids(together) == token_ids(alone)
    config = ModelConfig.from_hf(folder.config)
    assert {file.stem.rpartition("-")[2] for file in tmp_path.glob("*.weights")} == {
        shard_of(config, rank, layout).label for rank in range(layout.num_ranks)
    }


@pytest.mark.parametrize("layout", [RankLayout(3), RankLayout(3, 2)], ids=["one_stage", "two_stages"])
def test_neighbours_change_no_bit_with_ranks(layout: RankLayout, tmp_path: Path) -> None:
    """Sums over three ranks depend on their order: it must not depend on the number of rows."""
    folder = write_model("smollm2", tmp_path, **SMOLLM2)

    def use(executor: Any) -> tuple[list[list[Token]], list[list[Token]]]:
        prompts = [make_prompt(length) for length in (40, 3, 21)]
        dealer = BlockDealer()
        together = generate(executor, [dealer.sequence(p, 3, logprobs=300) for p in prompts])
        alone = [generate(executor, [dealer.sequence(p, 3, logprobs=300)], 16)[0] for p in prompts]
        return together, alone

    together, alone = lead_ranks(folder, layout, tmp_path, use)
    assert together == alone


def make_request(length: int, num_samples: int, **more: Any) -> AddSequence:
    sampling = SamplingParams(max_tokens=20, temperature=0.7, seed=length, ignore_eos=True, **more)
    return AddSequence(
        SequenceId(f"s{length}"), tuple(make_prompt(length)), sampling, num_samples=num_samples
    )


def run_engine(executor: Executor) -> tuple[dict[tuple[str, int], list[int]], list[float]]:
    """A full engine with too few blocks: it swaps, shares, copies, and scores a prompt."""
    config = SchedulerConfig(
        num_blocks=10,
        num_host_blocks=20,
        max_model_len=200,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        low_watermark=0.0,
        high_watermark=0.0,
        preemption="swap",
    )
    core = EngineCore(config, executor, frozenset([2]), lambda: 0.0)
    for request in (make_request(30, 1), make_request(45, 2, prompt_logprobs=1), make_request(20, 3)):
        core.handle(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    scores: list[float] = []
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokensSampled):
                found = tokens.setdefault((event.seq_id, event.index), [])
                found += [token.token_id for token in event.tokens]
            elif isinstance(event, PromptScored):
                scores += [token.logprob or 0.0 for token in event.tokens]
    core.assert_idle()
    assert core.stats().num_preemptions_swap > 0
    return tokens, scores


@pytest.mark.parametrize("layout", [RankLayout(2), RankLayout(2, 2)], ids=["one_stage", "two_stages"])
def test_an_engine_that_swaps_copies_and_scores_gives_the_same_with_ranks(
    layout: RankLayout, tmp_path: Path
) -> None:
    folder = write_model("qwen2", tmp_path, **FEW_LAYERS)
    parts = {"num_blocks": 10, "num_host_blocks": 20}
    alone = run_engine(load_rank(folder, None, tmp_path, **parts).runner)
    together = lead_ranks(folder, layout, tmp_path, run_engine, **parts)
    assert together == (alone[0], pytest.approx(alone[1], abs=2e-4))


def test_the_demo_model_gives_the_tokens_of_one_rank_on_three(tmp_path: Path) -> None:
    folder = resolve_model(str(demo_model_path()), cache_dir=tmp_path)

    def use(executor: Any) -> list[Token]:
        prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
        return generate(executor, [BlockDealer(8).sequence(prompt, 8)])[0]

    parts = {"num_blocks": 8}
    alone = use(load_rank(folder, None, tmp_path, **parts).runner)
    together = lead_ranks(folder, RankLayout(3), tmp_path, use, **parts)
    assert token_ids([together]) == token_ids([alone])


def test_ranks_hold_a_part_of_the_kv_each(tmp_path: Path) -> None:
    folder = write_model("smollm2", tmp_path, **SMOLLM2)
    heads = run_groups(
        RankLayout(2), lambda mine: load_rank(folder, mine, tmp_path).kv_cache.blocks.shape[3]
    )
    assert heads == [2, 1]
