"""Prefill + decode on workers of several ranks, a lone engine and transformers give the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_clusters import tiny_config, tiny_model
from tiny_models import VOCAB_SIZE

from cluster.compose import open_model
from cluster.config import ClusterConfig
from cluster.engine_parts import build_engine
from cluster.local import LocalCluster
from cluster.verification import greedy_cases, verify_answers
from cluster.verification.colocated import answer_colocated
from cluster.verification.reference import TransformersReference

TEXT = [3 + (i * i + 7 * i) % (VOCAB_SIZE - 3) for i in range(997)]


def rank_config(
    model: Path, prefill: tuple[int, int], decode: tuple[int, int], **changes: object
) -> ClusterConfig:
    """Sizes are (tensor parallel, pipeline parallel)."""
    sizes = {
        f"{role}__{kind}_parallel_size": size
        for role, layout in (("prefill", prefill), ("decode", decode))
        for kind, size in zip(("tensor", "pipeline"), layout, strict=True)
    }
    return tiny_config(model, **sizes, **changes)


async def assert_verified(config: ClusterConfig) -> None:
    folder = open_model(config)
    baseline = build_engine(config, config.prefill, folder)

    async def colocated(cases):  # type: ignore[no-untyped-def]
        return answer_colocated(baseline.make_core(), cases)

    async with LocalCluster(config) as cluster:
        found = await verify_answers(
            greedy_cases(TEXT, num_cases=5, max_tokens=8, limit=baseline.scheduler.max_model_len),
            cluster=cluster.answer,
            colocated=colocated,
            reference=TransformersReference(folder.path, folder.eos_token_ids).answer,
            is_tie=None,
            say=lambda _: None,
        )
        await cluster.wait_until_idle(timeout_s=10)
    assert found.is_equal, "\n".join(found.lines())


Layout = tuple[int, int]

PLACES = [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 1))]
"""On four ranks each of the two KV heads is on two of them."""
STAGES = [((1, 2), (2, 1)), ((2, 1), (1, 2)), ((2, 2), (2, 2))]


@pytest.mark.parametrize("transport", [pytest.param("nixl", marks=pytest.mark.nixl), "gloo"])
@pytest.mark.parametrize(("prefill", "decode"), PLACES)
async def test_workers_that_deal_out_heads_hand_over(
    model: Path, prefill: Layout, decode: Layout, transport: str
) -> None:
    await assert_verified(rank_config(model, prefill, decode, kv_transfer__transport=transport))


@pytest.mark.parametrize(("prefill", "decode"), STAGES)
async def test_workers_of_stages_hand_over(model: Path, prefill: Layout, decode: Layout) -> None:
    await assert_verified(rank_config(model, prefill, decode, kv_transfer__transport="loopback"))


async def test_ranks_may_meet_by_gloo(model: Path) -> None:
    changes = {"kv_transfer__transport": "loopback", "ranks__communicator": "gloo"}
    await assert_verified(rank_config(model, (2, 1), (4, 1), **changes))


async def test_experts_may_be_dealt_out_whole(tmp_path: Path) -> None:
    mixture = tiny_model("mixtral", tmp_path, num_hidden_layers=2)
    changes = {"kv_transfer__transport": "loopback", "ranks__expert_parallel": True}
    await assert_verified(rank_config(mixture, (2, 1), (1, 1), **changes))


async def test_ranks_wait_for_workers_that_take_longer_to_load(model: Path) -> None:
    """Than a step may take, as those of large models do."""
    config = rank_config(
        model, (2, 1), (1, 1), kv_transfer__transport="loopback", ranks__step_timeout_s=0.2
    )
    cluster = LocalCluster(config)
    await asyncio.sleep(0.5)
    async with cluster:
        await cluster.wait_until_idle(timeout_s=30)
