"""Prefill + decode on workers of several ranks, a lone engine and transformers give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_clusters import tiny_config
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


PAIRS = [
    ((2, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((2, 1), (4, 1)),
    ((4, 1), (2, 1)),
    ((1, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((2, 2), (2, 2)),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_workers_of_any_ranks_hand_over(
    model: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    await assert_verified(rank_config(model, prefill, decode, kv_transfer__transport="loopback"))


@pytest.mark.nixl
@pytest.mark.parametrize(("prefill", "decode"), [((2, 1), (4, 1)), ((1, 2), (2, 1))])
async def test_workers_of_any_ranks_hand_over_by_nixl(
    model: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    await assert_verified(rank_config(model, prefill, decode))
