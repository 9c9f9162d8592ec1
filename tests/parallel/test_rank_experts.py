"""Experts over several ranks: their columns or whole ones dealt out, with the tokens of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_variants import best_ops
from parity_kit import FEW_LAYERS, LENGTHS, assert_alike, cpp_ops, generate_some, token_ids
from rank_groups import lead_ranks
from tiny_models import BlockDealer, generate, make_prompt, make_reference, reference_greedy
from tiny_shards import load_rank, write_model

from engine.model import ModelConfig
from engine.parallel import shard_of
from engine.weights import load_weights
from protocol.errors import StartupError
from protocol.generation import Token
from protocol.rank_layout import RankLayout

generate_greedily = partial(generate_some, temperature=0.0)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixtral", RankLayout(2)),
        ("mixtral_sliding", RankLayout(2)),
        ("qwen3_moe_mixed", RankLayout(2, 2)),
        ("qwen3_moe", RankLayout(3)),
    ],
)
def test_ranks_give_the_tokens_of_one(
    kind: str, layout: RankLayout, expert_parallel: bool, tmp_path: Path
) -> None:
    changes = {**FEW_LAYERS, "num_key_value_heads": 3} if layout.num_ranks == 3 else FEW_LAYERS
    folder = write_model(kind, tmp_path, **changes)
    reference = make_reference(kind, **changes)
    expected = [reference_greedy(reference, make_prompt(length), 5) for length in LENGTHS]
    alone = generate_greedily(load_rank(folder, None, tmp_path).runner)
    together = lead_ranks(folder, layout, tmp_path, generate_greedily, expert_parallel=expert_parallel)
    assert token_ids(alone) == expected
    assert_alike(together, alone)


def test_files_of_packed_experts_are_told_apart_by_how_they_are_dealt_out(tmp_path: Path) -> None:
    best_ops(torch.float32)  # skips where there are none
    folder = write_model("mixtral", tmp_path, **FEW_LAYERS)
    alone = token_ids(generate_greedily(load_rank(folder, None, tmp_path).runner))
    for expert_parallel in (False, True, True):  # the last one maps what was packed
        together = lead_ranks(
            folder,
            RankLayout(2),
            tmp_path,
            generate_greedily,
            make_ops=cpp_ops,
            expert_parallel=expert_parallel,
        )
        assert token_ids(together) == alone
    names = {file.stem.rpartition("-")[2] for file in tmp_path.glob("*.weights")}
    assert names == {"rank0of2", "rank1of2", "rank0of2experts", "rank1of2experts"}


def test_neighbours_change_no_bit_with_ranks_of_experts(tmp_path: Path) -> None:
    folder = write_model("mixtral_sliding", tmp_path, **FEW_LAYERS)

    def use(executor: Any) -> tuple[list[list[Token]], list[list[Token]]]:
        dealer = BlockDealer()
        prompts = [make_prompt(length) for length in (40, 3, 21)]
        together = generate(executor, [dealer.sequence(p, 3, logprobs=300) for p in prompts])
        alone = [generate(executor, [dealer.sequence(p, 3, logprobs=300)], 16)[0] for p in prompts]
        return together, alone

    together, alone = lead_ranks(folder, RankLayout(2), tmp_path, use, expert_parallel=True)
    assert together == alone


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_expert_is_read_by_one_rank_only(num_ranks: int, tmp_path: Path) -> None:
    folder = write_model("mixtral_sliding", tmp_path, **FEW_LAYERS)
    config = ModelConfig.from_hf(folder.config)
    whole = load_weights(folder, torch.float32)
    seen: list[str] = []
    for rank in range(num_ranks):
        shard = shard_of(config, rank, RankLayout(num_ranks), expert_parallel=True)
        part = load_weights(folder, torch.float32, shard=shard)
        experts = [name for name in part if ".experts." in name]
        assert all(torch.equal(part[name], whole[name]) for name in experts)
        seen += experts
    assert sorted(seen) == sorted(name for name in whole if ".experts." in name)


def test_columns_of_experts_add_up_to_the_whole(tmp_path: Path) -> None:
    folder = write_model("qwen3_moe_mixed", tmp_path, **FEW_LAYERS)
    config = ModelConfig.from_hf(folder.config)
    whole = load_weights(folder, torch.float32)
    layout = RankLayout(tensor_parallel_size=3)
    parts = [load_weights(folder, torch.float32, shard=shard_of(config, rank, layout)) for rank in range(3)]
    for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        for prefix in ("model.layers.0.mlp.experts.5", "model.layers.1.mlp"):
            name_of = f"{prefix}.{name}.weight"
            assert torch.equal(torch.cat([part[name_of] for part in parts], axis), whole[name_of])


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expert_parallel", "why"),
    [
        ("mixtral", 5, True, "4 experts, which 5 ranks cannot share"),
        ("qwen3_moe", 5, False, "4 columns in each expert"),
        ("llama", 2, True, "no experts to deal out: leave ranks.expert_parallel out"),
    ],
)
def test_impossible_splits_of_experts_are_refused(
    kind: str, num_ranks: int, expert_parallel: bool, why: str
) -> None:
    changes = {"moe_intermediate_size": 4} if kind == "qwen3_moe" else {}
    reference = make_reference(kind, **changes)
    config = ModelConfig.from_hf(
        {**reference.config.to_dict(), "architectures": [type(reference).__name__]}
    )
    with pytest.raises(StartupError, match=why):
        shard_of(config, 0, RankLayout(num_ranks), expert_parallel=expert_parallel)
