"""`splitserve verify`: are prefill + decode, a lone engine and transformers of one opinion?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.config import ClusterConfig
from cluster.verification import Case, Verification, greedy_cases, verify_answers
from cluster.verification.compare import IsTie
from protocol.errors import StartupError

if TYPE_CHECKING:
    from cluster.engine_parts import EngineParts
    from cluster.local import LocalCluster
    from cluster.verification.reference import TransformersReference
    from cluster.verification.remote import RemoteCluster
    from engine.weights import ModelFolder


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify, and against what."""

    num_prompts: int = 64
    max_tokens: int = 48
    url: str | None = None
    """A running server; None composes a cluster in this process."""
    with_reference: bool = True


def verify(config: ClusterConfig, options: VerifyOptions, console: Console) -> bool:
    """Run all comparisons and print them; True when nothing differs. Raises `SplitserveError`."""
    from cluster.compose import open_model

    remote = _find_server(config, options.url, console) if options.url is not None else None
    from cluster.engine_parts import build_engine

    folder = open_model(config)
    baseline = build_engine(config, config.prefill, folder)
    _require_judge(config, baseline.fingerprint.dtype, options)
    cases = _cases(folder, baseline.scheduler.max_model_len, options)
    reference = _load_reference(folder, console) if options.with_reference else None
    found = asyncio.run(_compare(config, _Oracles(baseline, reference), cases, remote, console))
    for line in found.lines():
        console.print(line, highlight=False, markup=False)
    console.print("[green]all equal[/]" if found.is_equal else "[red]DIFFERENT[/]")
    return found.is_equal


@dataclass(frozen=True, slots=True)
class _Oracles:
    """What the cluster is compared with."""

    baseline: EngineParts
    transformers: TransformersReference | None

    async def colocated(self, cases: Sequence[Case]) -> list[list[int]]:
        from cluster.verification.colocated import answer_colocated

        return await asyncio.to_thread(answer_colocated, self.baseline.make_core(), cases)

    @property
    def is_tie(self) -> IsTie | None:
        """In float32 nothing is excused; narrower types may split where the reference is undecided."""
        if self.transformers is None or self.baseline.fingerprint.dtype == "float32":
            return None
        return self.transformers.is_bf16_tie


async def _compare(
    config: ClusterConfig,
    oracles: _Oracles,
    cases: Sequence[Case],
    remote: RemoteCluster | None,
    console: Console,
) -> Verification:
    async with _cluster(config, remote) as cluster:
        return await verify_answers(
            cases,
            cluster=cluster.answer,
            colocated=oracles.colocated,
            reference=oracles.transformers.answer if oracles.transformers else None,
            is_tie=oracles.is_tie,
            adds_up_alike=_adds_up_alike(config),
            say=partial(console.print, style="dim"),
        )


def _require_judge(config: ClusterConfig, dtype: str, options: VerifyOptions) -> None:
    """Raises `StartupError` where only the reference could say whether a difference means anything."""
    if dtype != "float32" and not options.with_reference and not _adds_up_alike(config):
        raise StartupError(
            f"ranks that share layers round sums in {dtype} otherwise than one engine does: leave"
            " --no-reference out, so that ties can be told, or verify with --dtype float32"
        )


def _adds_up_alike(config: ClusterConfig) -> bool:
    """Ranks that share layers round each part of a sum by itself, where a lone engine rounds once."""
    return all(config.layout_of(pool).tensor_parallel_size == 1 for pool in (config.prefill, config.decode))


def _find_server(config: ClusterConfig, url: str, console: Console) -> RemoteCluster:
    """Ask the server first: loading the models to compare it with takes long."""
    from cluster.compose import read_api_key
    from cluster.verification.remote import RemoteCluster, ask_model, base_url

    base, key = base_url(url), read_api_key(config)
    model = ask_model(base, key)
    console.print(f"{base} serves {model}", style="dim", highlight=False, markup=False)
    return RemoteCluster(base, model, key)


@asynccontextmanager
async def _cluster(
    config: ClusterConfig, remote: RemoteCluster | None
) -> AsyncIterator[LocalCluster | RemoteCluster]:
    from cluster.local import LocalCluster

    if remote is not None:
        yield remote
        return
    async with LocalCluster(config) as cluster:
        yield cluster


def _cases(folder: ModelFolder, limit: int, options: VerifyOptions) -> list[Case]:
    import tokenizers

    from cluster.verification.cases import SAMPLE_TEXT

    if options.max_tokens >= limit:
        raise StartupError(f"--max-tokens must be below the context length of {limit} tokens")
    text = tokenizers.Tokenizer.from_file(str(folder.tokenizer_path)).encode(SAMPLE_TEXT).ids
    return greedy_cases(text, options.num_prompts, options.max_tokens, limit)


def _load_reference(folder: ModelFolder, console: Console) -> TransformersReference:
    from cluster.verification.reference import TransformersReference

    console.print("loading transformers in float32 ...", style="dim")
    return TransformersReference(folder.path, folder.eos_token_ids)
