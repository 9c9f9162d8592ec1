"""From the configuration to one loaded engine: model, KV cache, scheduler. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import ClusterConfig, DecodePoolConfig, PoolConfig
from cluster.provided_engine import OnEvents, ProvidedEngine
from cluster.rank_parts import RankParts, load_rank
from cluster.ranks.team import LeaderTeam, TeamOfOne
from engine import Command, EngineCore, EngineThread, SchedulerConfig
from engine.graph_runner import capture_for
from engine.kv_cache import KvCache
from engine.parallel.leader import LeaderRunner
from engine.runner import ModelRunner
from engine.weights import ModelFolder, Progress
from kv_transfer import PoolMemory, Provision
from protocol.handoff import Fingerprint
from rpc import Engine


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded engine, not yet running."""

    rank: RankParts
    """What this process has of the model: all of it unless other ranks share it."""
    executor: ModelRunner | LeaderRunner
    scheduler: SchedulerConfig
    eos_token_ids: frozenset[int]
    team: LeaderTeam

    @property
    def kv_cache(self) -> KvCache:
        return self.rank.kv_cache

    @property
    def pool_memory(self) -> PoolMemory:
        return self.rank.pool_memory

    @property
    def fingerprint(self) -> Fingerprint:
        return self.rank.fingerprint

    @property
    def ops_name(self) -> str:
        """What computes, for people."""
        num_ranks = self.team.layout.num_ranks
        return self.executor.ops_name + (f" on {num_ranks} ranks" if num_ranks > 1 else "")

    def make_core(self) -> EngineCore:
        return EngineCore(self.scheduler, self.executor, self.eos_token_ids, time.monotonic)

    def make_thread(self, name: str, on_events: OnEvents) -> Engine[Command]:
        if self.kv_cache.blocks.device.type != "cpu":
            return self._make_thread(name, on_events)  # such memory is there from the start
        return ProvidedEngine(
            lambda on_events: self._make_thread(name, on_events), Provision(self.pool_memory), on_events
        )

    def _make_thread(self, name: str, on_events: OnEvents) -> Engine[Command]:
        thread = EngineThread(
            self.make_core(),
            on_events,
            name,
            progress=lambda: self.executor.progress,
            keep_alive=self.team.keep_alive,
        )
        return self.team.attend(thread)


def build_engine(
    config: ClusterConfig,
    pool: PoolConfig,
    folder: ModelFolder,
    progress: Progress | None = None,
    *,
    end_phase: Callable[[str], None] = lambda phase: None,
    team: LeaderTeam | None = None,
) -> EngineParts:
    """Load the model and lay out its KV cache. Takes seconds. Raises `StartupError`.

    `end_phase` hears when kernels and weights are loaded, and when the rest is done. `team` is that
    of several ranks, which this one leads; None: there is one, whatever the configuration says.
    """
    team = team or TeamOfOne()
    rank = load_rank(config, pool, folder, team, progress=progress, end_phase=end_phase)
    executor = team.lead(_runner(rank, folder, pool), rank.kv_cache.block_size)
    executor.warm_up()
    end_phase("engine")
    return EngineParts(
        rank=rank,
        executor=executor,
        scheduler=_scheduler_config(config, pool, rank),
        eos_token_ids=frozenset(folder.eos_token_ids),
        team=team,
    )


def _runner(rank: RankParts, folder: ModelFolder, pool: PoolConfig) -> ModelRunner:
    model = rank.model
    return ModelRunner(
        model,
        rank.kv_cache,
        tuple(folder.eos_token_ids),
        rank.host_pool,
        # A prefill worker has no steps that only decode.
        capture=capture_for(model.ops, model.device) if isinstance(pool, DecodePoolConfig) else None,
        max_sequences=pool.max_num_seqs,
    )


def _scheduler_config(config: ClusterConfig, pool: PoolConfig, rank: RankParts) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=rank.kv_cache.num_blocks,
        block_size=config.block_size_of(pool),
        max_model_len=rank.model.max_model_len,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_prefill_tokens=pool.max_num_prefill_tokens,
        max_num_waiting=pool.max_num_waiting,
        overload_retry_after_s=pool.overload_retry_after_s,
        enable_prefix_caching=config.enable_prefix_caching,
        low_watermark=pool.low_watermark,
        high_watermark=pool.high_watermark,
        policy=pool.policy,
        ageing_tokens=pool.ageing_tokens,
        preemption=pool.preemption,
        num_host_blocks=rank.host_pool.num_blocks if rank.host_pool else 0,
        long_prefill_token_threshold=pool.long_prefill_token_threshold,
    )
