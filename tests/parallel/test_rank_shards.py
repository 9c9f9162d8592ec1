"""Shards: every weight is somewhere, once but for replicated KV heads; the impossible is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.config import ModelConfig
from engine.parallel import Shard, shard_of
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout, kv_head_ranges, split

LLAMA = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 100,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
    }
)


def shards_of(num_heads: int, num_kv_heads: int, num_ranks: int, **sizes: int) -> list[Shard]:
    config = replace(LLAMA, num_heads=num_heads, num_kv_heads=num_kv_heads, **sizes)
    return [shard_of(config, rank, RankLayout(num_ranks)) for rank in range(num_ranks)]


@st.composite
def layouts(draw: st.DrawFn) -> list[Shard]:
    num_kv_heads = draw(st.integers(1, 16))
    num_heads = num_kv_heads * draw(st.integers(1, 12))
    num_ranks = draw(st.integers(1, min(num_heads, 64)))
    sizes = {
        "intermediate_size": draw(st.integers(num_ranks, 3000)),
        "vocab_size": draw(st.integers(num_ranks, 3000)),
    }
    return shards_of(num_heads, num_kv_heads, num_ranks, **sizes)


@given(layouts())
def test_queries_columns_and_words_are_dealt_out_once_and_in_order(shards: list[Shard]) -> None:
    whole = shards[0].whole
    assert [head for shard in shards for head in shard.query_heads] == list(range(whole.num_heads))
    assert [i for shard in shards for i in shard.inner] == list(range(whole.intermediate_size))
    assert [i for shard in shards for i in shard.words] == list(range(whole.vocab_size))
    assert all(len(shard.inner) and len(shard.words) and len(shard.query_heads) for shard in shards)


@given(layouts())
def test_every_query_head_finds_its_key_value_head_where_it_is(shards: list[Shard]) -> None:
    whole = shards[0].whole
    group = whole.num_heads // whole.num_kv_heads
    for shard in shards:
        local = shard.local
        assert local.num_heads % local.num_kv_heads == 0
        local_group = local.num_heads // local.num_kv_heads
        for position, head in enumerate(shard.query_heads):
            assert shard.kv_heads[position // local_group] == head // group


@given(layouts())
def test_kv_heads_are_split_or_one_each(shards: list[Shard]) -> None:
    whole, num_ranks = shards[0].whole, len(shards)
    held = [head for shard in shards for head in shard.kv_heads]
    assert held == sorted(held)
    assert set(held) == set(range(whole.num_kv_heads))
    assert len(held) == max(whole.num_kv_heads, num_ranks)
    sizes = [len(shard.kv_heads) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_ranks", "query_heads", "kv_heads"),
    [
        (2, [range(6), range(6, 9)], [range(2), range(2, 3)]),
        (3, [range(3), range(3, 6), range(6, 9)], [range(1), range(1, 2), range(2, 3)]),
        (
            4,
            [range(2), range(2, 3), range(3, 6), range(6, 9)],
            [range(1), range(1), range(1, 2), range(2, 3)],
        ),
    ],
)
def test_heads_of_smollm2(num_ranks: int, query_heads: list[range], kv_heads: list[range]) -> None:
    shards = shards_of(9, 3, num_ranks)
    assert [shard.query_heads for shard in shards] == query_heads
    assert [shard.kv_heads for shard in shards] == kv_heads


def test_a_usual_model_splits_evenly() -> None:
    shards = shards_of(32, 8, 4, intermediate_size=14336, vocab_size=128256)
    assert {shard.local for shard in shards} == {shards[0].local}
    assert shards[1].query_heads == range(8, 16)
    assert shards[1].kv_heads == range(2, 4)


def test_few_kv_heads_are_replicated_beside_each_other() -> None:
    assert kv_head_ranges(2, 4) == (range(1), range(1), range(1, 2), range(1, 2))
    assert split(7, 3) == (range(3), range(3, 5), range(5, 7))


def test_cuts_follow_the_names_of_weights() -> None:
    shard = shards_of(9, 3, 3)[1]
    layer = "model.layers.0"
    for name, axis, span, total in (
        ("model.embed_tokens.weight", 0, shard.words, 320),
        ("lm_head.weight", 0, shard.words, 320),
        (f"{layer}.self_attn.q_proj.weight", 0, range(48, 96), 144),
        (f"{layer}.self_attn.k_proj.bias", 0, range(16, 32), 48),
        (f"{layer}.self_attn.o_proj.weight", 1, range(48, 96), 144),
        (f"{layer}.mlp.up_proj.bias", 0, shard.inner, 100),
        (f"{layer}.mlp.down_proj.weight", 1, shard.inner, 100),
    ):
        cut = shard.cut(name)
        assert cut is not None, name
        assert (cut.axis, cut.span, cut.total) == (axis, span, total), name
    for name in (f"{layer}.self_attn.o_proj.bias", f"{layer}.input_layernorm.weight", "model.norm.weight"):
        assert shard.cut(name) is None
    assert shard.is_added_elsewhere(f"{layer}.mlp.down_proj.bias")
    assert not shards_of(9, 3, 3)[0].is_added_elsewhere(f"{layer}.mlp.down_proj.bias")


@pytest.mark.parametrize(
    ("num_ranks", "rank", "sizes", "why"),
    [
        (0, 0, {}, "at least one rank"),
        (2, 2, {}, "no rank 2 among 2"),
        (10, 0, {}, "9 attention heads, which 10 ranks cannot share"),
        (4, 0, {"intermediate_size": 3}, "3 columns"),
        (4, 0, {"vocab_size": 3}, "3 tokens"),
    ],
)
def test_impossible_splits_are_refused(num_ranks: int, rank: int, sizes: dict[str, int], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        shard_of(replace(LLAMA, **sizes), rank, RankLayout(num_ranks))
