"""Prefill + decode, a lone engine and transformers give the same tokens, for every family of models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_clusters import tiny_config, tiny_model
from tiny_models import KINDS, VOCAB_SIZE

from cluster.compose import open_model
from cluster.engine_parts import build_engine
from cluster.local import LocalCluster
from cluster.verification import Case, greedy_cases, verify_answers
from cluster.verification.cases import seeded_cases
from cluster.verification.colocated import answer_colocated
from cluster.verification.reference import TransformersReference
from engine import AddSequence, EngineCore, TokensSampled
from protocol.generation import GenerationRequest, Token
from protocol.ids import SequenceId

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


@pytest.mark.parametrize(
    ("transport", "dtype"),
    [
        pytest.param("nixl", "float32", marks=pytest.mark.nixl),
        pytest.param("nixl", "bfloat16", marks=pytest.mark.nixl),
        ("gloo", "float32"),
    ],
)
async def test_a_cluster_gives_the_bits_of_one_engine(transport: str, dtype: str, tmp_path: Path) -> None:
    """Every log-probability, of greedy and of seeded tokens: as good as the logits themselves."""
    config = tiny_config(tiny_model("smollm2", tmp_path), dtype=dtype, kv_transfer__transport=transport)
    folder = open_model(config)
    baseline = build_engine(config, config.prefill, folder)
    plain = greedy_cases(TEXT, num_cases=9, max_tokens=12, limit=baseline.scheduler.max_model_len)
    cases = [
        replace(case, sampling=replace(case.sampling, logprobs=20))
        for case in (*plain, *seeded_cases(plain))
    ]
    async with LocalCluster(config) as cluster:
        split = await asyncio.gather(*(_answer(cluster, case) for case in cases))
        await cluster.wait_until_idle(timeout_s=10)
    assert split == _answer_alone(baseline.make_core(), cases)


async def _answer(cluster: LocalCluster, case: Case) -> list[Token]:
    request = GenerationRequest(
        cluster.router.new_request_id(), prompt_token_ids=case.prompt_token_ids, sampling=case.sampling
    )
    deltas = cluster.router.orchestrator.generate(request)
    return [token async for delta in deltas for token in delta.tokens]


def _answer_alone(core: EngineCore, cases: list[Case]) -> list[list[Token]]:
    answers: dict[SequenceId, list[Token]] = {SequenceId(str(i)): [] for i in range(len(cases))}
    for name, case in zip(answers, cases, strict=True):
        assert not core.handle(AddSequence(name, case.prompt_token_ids, case.sampling))
    while core.has_work:
        for event in core.step():
            assert isinstance(event, TokensSampled)
            answers[event.seq_id] += event.tokens
    return list(answers.values())
