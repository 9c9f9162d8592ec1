"""Shards: every weight is somewhere, once but for replicated KV heads; the impossible is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.config import ModelConfig
from engine.parallel import Shard, shard_of
from protocol.errors import StartupError
from protocol.rank_layout import KvPart, RankLayout, kv_head_ranges, kv_parts, split

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


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_every_layer_is_in_one_stage_and_the_ends_are_where_they_belong(
    num_layers: int, num_stages: int, num_places: int
) -> None:
    windows = tuple(10 + index for index in range(num_layers))
    config = replace(LLAMA, num_layers=num_layers, windows=windows)
    layout = RankLayout(num_places, min(num_stages, num_layers))
    shards = [shard_of(config, rank, layout) for rank in range(layout.num_ranks)]
    for place in range(num_places):
        stages = [shard for shard in shards if shard.place == place]
        assert [layer for shard in stages for layer in shard.layers] == list(range(num_layers))
        assert [window for shard in stages for window in shard.local.windows] == list(windows)
        assert [shard.local.has_embedding for shard in stages] == [True] + [False] * (len(stages) - 1)
        assert [shard.local.has_head for shard in stages] == [False] * (len(stages) - 1) + [True]
    assert all(shard.local.num_layers == len(shard.layers) for shard in shards)
    assert [KvPart(shard.layers, shard.kv_heads) for shard in shards] == list(
        kv_parts(num_layers, config.num_kv_heads, layout)
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_of_a_stage_count_from_its_first_and_ties_need_the_embedding_twice(is_tied: bool) -> None:
    config = replace(LLAMA, num_layers=5, windows=(None,) * 5, tie_word_embeddings=is_tied)
    shards = [shard_of(config, rank, RankLayout(1, 3)) for rank in range(3)]
    assert [shard.layers for shard in shards] == [range(2), range(2, 4), range(4, 5)]
    for name, found in (
        ("model.layers.2.mlp.up_proj.weight", [None, "model.layers.0.mlp.up_proj.weight", None]),
        ("model.layers.4.input_layernorm.weight", [None, None, "model.layers.0.input_layernorm.weight"]),
        ("model.embed_tokens.weight", [True, False, is_tied]),
        ("model.norm.weight", [False, False, True]),
        ("lm_head.weight", [False, False, True]),
    ):
        names = [shard.local_name(name) for shard in shards]
        assert names == [(name if held else None) if isinstance(held, bool) else held for held in found]


def test_files_of_packed_weights_have_names_of_their_own_for_each_rank_and_layout() -> None:
    config = replace(LLAMA, num_layers=2, windows=(None,) * 2)
    layouts = [RankLayout(2), RankLayout(1, 2), RankLayout(2, 2)]
    labels = [
        shard_of(config, rank, layout).label for layout in layouts for rank in range(layout.num_ranks)
    ]
    assert len(set(labels)) == 2 + 2 + 4
    assert labels[0] == "rank0of2"
    assert labels[-1] == "rank3of4in2stages"


@pytest.mark.parametrize(
    ("layout", "rank", "sizes", "why"),
    [
        (RankLayout(0), 0, {}, "at least one rank"),
        (RankLayout(1, 0), 0, {}, "at least one rank"),
        (RankLayout(2), 2, {}, "no rank 2 among 2"),
        (RankLayout(10), 0, {}, "9 attention heads, which 10 ranks cannot share"),
        (RankLayout(4), 0, {"intermediate_size": 3}, "3 columns"),
        (RankLayout(4), 0, {"vocab_size": 3}, "3 tokens"),
        (RankLayout(1, 2), 0, {}, "1 layers, which 2 stages cannot share: lower pipeline_parallel_size"),
    ],
)
def test_impossible_splits_are_refused(
    layout: RankLayout, rank: int, sizes: dict[str, int], why: str
) -> None:
    with pytest.raises(StartupError, match=why):
        shard_of(replace(LLAMA, **sizes), rank, layout)
