"""Which part of a model belongs to one rank of several? Pure: sizes in, ranges out.

              whole                     rank r                  split along
    embedding, head   [vocab, hidden]   its words               rows
    q, k, v           [heads, hidden]   its heads               rows, and biases
    output            [hidden, heads]   its heads               columns; place 0 adds the bias
    gate, up          [inner, hidden]   its inner columns       rows, and biases
    down              [hidden, inner]   its inner columns       columns; place 0 adds the bias
    an expert         as gate, up, down, of its own inner columns; or, expert parallel, whole experts
    router            [experts, hidden] all                     -
    norms                               all                     -

That is dealt out within each stage. The stages have neighbouring layers; the first has the embedding, the
last has the last norm and the head, which is the embedding where these are tied.

A rank's part is a model of its own, with fewer layers, heads and so on: `Shard.local`. Sizes need not
divide by the number of ranks; then ranks differ by one layer, head, column or word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.model.config import ModelConfig
from engine.model.experts import ExpertsConfig, experts_of
from engine.model.sharing import require_shareable
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout, kv_head_ranges, split


@dataclass(frozen=True, slots=True)
class Cut:
    """A range along one axis of a weight."""

    axis: int
    span: range
    total: int
    """What the axis has in the whole model."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a model."""

    whole: ModelConfig
    rank: int
    layout: RankLayout
    layers: range
    """Of the rank's stage."""
    query_heads: range
    kv_heads: range
    inner: range
    """Columns of the MLP's hidden layer."""
    words: range
    """Token ids, of the embedding and of the head."""
    experts: range
    """Of each layer that has any."""
    expert_inner: range
    """Columns of each expert's hidden layer."""

    @property
    def place(self) -> int:
        """Among the ranks that share the stage's layers."""
        return self.layout.place_of(self.rank)

    @property
    def has_embedding(self) -> bool:
        """The rank is one of the first stage."""
        return self.layers.start == 0

    @property
    def has_head(self) -> bool:
        """The rank is one of the last stage."""
        return self.layers.stop == self.whole.num_layers

    @property
    def local(self) -> ModelConfig:
        """The rank's part as a model: what its weights, its KV cache and its ops are made for."""
        experts = self.whole.experts[self.layers.start : self.layers.stop]
        return replace(
            self.whole,
            num_layers=len(self.layers),
            windows=self.whole.windows[self.layers.start : self.layers.stop],
            has_embedding=self.has_embedding,
            has_head=self.has_head,
            num_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            vocab_size=len(self.words),
            experts=tuple(each and self._local_experts(each) for each in experts),
        )

    @property
    def label(self) -> str:
        """Tells apart what was packed for different shards of one model."""
        num_stages = self.layout.pipeline_parallel_size
        stages = "" if num_stages == 1 else f"in{num_stages}stages"
        experts = "experts" if self._splits_experts else ""
        return f"rank{self.rank}of{self.layout.num_ranks}{stages}{experts}"

    def local_name(self, name: str) -> str | None:
        """What a weight is called in the rank's part, where layers count from 0; None: it is not in it."""
        if found := _LAYER.match(name):
            index = int(found["index"])
            if index not in self.layers:
                return None
            return f"model.layers.{index - self.layers.start}{name[found.end() :]}"
        has_embedding = self.has_embedding or (self.has_head and self.whole.tie_word_embeddings)
        is_held = has_embedding if name.startswith("model.embed_tokens.") else self.has_head
        return name if is_held else None

    def cut(self, name: str) -> Cut | None:
        """The part of a weight, by Hugging Face's name; None: all of it."""
        module, kind = name.split(".")[-2:] if "." in name else ("", name)
        find = _CUTS.get(module)
        if find is None:
            return None
        cut = self._expert_cut(module) if ".experts." in name else find(self)
        return cut if kind == "weight" or cut.axis == 0 else None

    def is_added_elsewhere(self, name: str) -> bool:
        """Whether it is added to a sum over a stage's ranks, once: at place 0, and so not here."""
        return self.place > 0 and name.endswith(_SUMMED_BIASES)

    def holds(self, name: str) -> bool:
        """Whether a weight has a part here at all: those of other ranks' experts have none."""
        match = _EXPERT.search(name)
        return match is None or int(match["expert"]) in self.experts

    @property
    def _splits_experts(self) -> bool:
        whole = experts_of(self.whole.experts)
        return whole is not None and len(self.experts) < whole.num_experts

    def _local_experts(self, whole: ExpertsConfig) -> ExpertsConfig:
        return replace(whole, intermediate_size=len(self.expert_inner), held=self.experts)

    def _expert_cut(self, module: str) -> Cut:
        whole = experts_of(self.whole.experts)
        total = whole.intermediate_size if whole else 0
        return Cut(1 if module == "down_proj" else 0, self.expert_inner, total)

    def _heads(self, heads: range, total: int, axis: int) -> Cut:
        size = self.whole.head_dim
        return Cut(axis, range(heads.start * size, heads.stop * size), total * size)


def shard_of(config: ModelConfig, rank: int, layout: RankLayout, *, expert_parallel: bool = False) -> Shard:
    """The part of `rank` (from 0) in `layout`; `expert_parallel` deals out whole experts within a stage.

    Raises `StartupError` for a model that is too small.
    """
    require_shareable(config, layout, expert_parallel=expert_parallel)
    if not 0 <= rank < layout.num_ranks:
        raise StartupError(f"there is no rank {rank} among {layout.num_ranks}")
    place, num_places = layout.place_of(rank), layout.tensor_parallel_size
    kv_ranges = kv_head_ranges(config.num_kv_heads, num_places)
    experts, expert_inner = _expert_ranges(config, place, num_places, expert_parallel=expert_parallel)
    return Shard(
        whole=config,
        rank=rank,
        layout=layout,
        layers=split(config.num_layers, layout.pipeline_parallel_size)[layout.stage_of(rank)],
        query_heads=_query_heads(config, kv_ranges, place),
        kv_heads=kv_ranges[place],
        inner=split(config.intermediate_size, num_places)[place],
        words=split(config.vocab_size, num_places)[place],
        experts=experts,
        expert_inner=expert_inner,
    )


def _expert_ranges(
    config: ModelConfig, place: int, num_places: int, *, expert_parallel: bool
) -> tuple[range, range]:
    """(Experts, columns of each) of a place."""
    whole = experts_of(config.experts)
    if whole is None:
        return range(0), range(0)
    experts, columns = range(whole.num_experts), range(whole.intermediate_size)
    if expert_parallel:
        return split(whole.num_experts, num_places)[place], columns
    return experts, split(whole.intermediate_size, num_places)[place]


def _query_heads(config: ModelConfig, kv_ranges: tuple[range, ...], place: int) -> range:
    """Those that attend to the place's KV heads; places with the same KV head share its queries."""
    mine = kv_ranges[place]
    holders = [other for other, heads in enumerate(kv_ranges) if heads == mine]
    group = config.num_heads // config.num_kv_heads
    queries = range(mine.start * group, mine.stop * group)
    shares = split(len(queries), len(holders))
    share = shares[holders.index(place)]
    return queries[share.start : share.stop]


_CUTS: Mapping[str, Callable[[Shard], Cut]] = {
    "embed_tokens": lambda shard: Cut(0, shard.words, shard.whole.vocab_size),
    "lm_head": lambda shard: Cut(0, shard.words, shard.whole.vocab_size),
    "q_proj": lambda shard: shard._heads(shard.query_heads, shard.whole.num_heads, axis=0),
    "k_proj": lambda shard: shard._heads(shard.kv_heads, shard.whole.num_kv_heads, axis=0),
    "v_proj": lambda shard: shard._heads(shard.kv_heads, shard.whole.num_kv_heads, axis=0),
    "o_proj": lambda shard: shard._heads(shard.query_heads, shard.whole.num_heads, axis=1),
    "gate_proj": lambda shard: Cut(0, shard.inner, shard.whole.intermediate_size),
    "up_proj": lambda shard: Cut(0, shard.inner, shard.whole.intermediate_size),
    "down_proj": lambda shard: Cut(1, shard.inner, shard.whole.intermediate_size),
}
_EXPERT = re.compile(r"\.experts\.(?P<expert>\d+)\.")
_SUMMED_BIASES = ("o_proj.bias", "down_proj.bias")
_LAYER = re.compile(r"model\.layers\.(?P<index>\d+)(?=\.)")
