"""Prefill + decode, a lone engine and transformers give the same tokens, for every family of models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_clusters import tiny_config, tiny_model
from tiny_models import KINDS, VOCAB_SIZE

from cluster.compose import open_model
from cluster.engine_parts import build_engine
from cluster.local import LocalCluster
from cluster.verification import greedy_cases, verify_answers
from cluster.verification.colocated import answer_colocated
from cluster.verification.reference import TransformersReference

LIMITS = {"dynamic_rope": 512}
"""Dynamic NTK: beyond the trained length transformers rotates a prompt's keys by the prompt's whole length,
which neither chunks nor shared prefixes can have; `engine/model/rope.py` says what we do instead."""

TEXT = [3 + (i * i + 7 * i) % (VOCAB_SIZE - 3) for i in range(997)]


@pytest.mark.nixl
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_a_cluster_over_nixl_answers_like_one_engine_and_like_transformers(
    kind: str, tmp_path: Path
) -> None:
    config = tiny_config(tiny_model(kind, tmp_path), max_model_len=LIMITS.get(kind))
    folder = open_model(config)
    baseline = build_engine(config, config.prefill, folder)

    async def colocated(cases):  # type: ignore[no-untyped-def]
        return answer_colocated(baseline.make_core(), cases)

    async with LocalCluster(config) as cluster:
        found = await verify_answers(
            greedy_cases(TEXT, num_cases=9, max_tokens=12, limit=baseline.scheduler.max_model_len),
            cluster=cluster.answer,
            colocated=colocated,
            reference=TransformersReference(folder.path, folder.eos_token_ids).answer,
            is_tie=None,
            say=lambda _: None,
        )
        await cluster.wait_until_idle(timeout_s=10)
    assert found.is_equal, "\n".join(found.lines())
