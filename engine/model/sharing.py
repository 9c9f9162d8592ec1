"""Can so many ranks share a model? Each needs a piece of all that is dealt out. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from engine.model.config import ModelConfig
from engine.model.experts import experts_of
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout


def require_shareable(model: ModelConfig, layout: RankLayout, *, expert_parallel: bool) -> None:
    """Raise `StartupError`, which names the key to change, for a model that is too small for its ranks.

    KV heads may be fewer than ranks: see `kv_head_ranges`.
    """
    num_stages, num_ranks = layout.pipeline_parallel_size, layout.tensor_parallel_size
    if num_ranks < 1 or num_stages < 1:
        raise StartupError(f"a model needs at least one rank, not {num_ranks} in {num_stages} stages")
    _require(model.num_layers, "layers", f"{num_stages} stages", num_stages, "pipeline_parallel_size")
    for total, what in _dealt_out(model, expert_parallel=expert_parallel):
        _require(total, what, f"{num_ranks} ranks", num_ranks, "tensor_parallel_size")


def _dealt_out(model: ModelConfig, *, expert_parallel: bool) -> Iterator[tuple[int, str]]:
    """What the ranks of a stage share, and how much of it there is."""
    yield model.num_heads, "attention heads"
    yield model.intermediate_size, "columns in its MLP"
    yield model.vocab_size, "tokens in its vocabulary"
    experts = experts_of(model.experts)
    if experts is not None:
        yield (
            (experts.num_experts, "experts")
            if expert_parallel
            else (experts.intermediate_size, "columns in each expert")
        )
    elif expert_parallel:
        raise StartupError("the model has no experts to deal out: leave ranks.expert_parallel out")


def _require(total: int, what: str, who: str, number: int, key: str) -> None:
    if number > total:
        raise StartupError(
            f"the model has {total} {what}, which {who} cannot share: lower {key} to {total} or less"
        )
