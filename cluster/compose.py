"""The composition root: from the configuration to the role objects, without Ray.

    config --> model folder --> engine (model, KV cache, scheduler) --> worker
           \\-> tokenizer --> router

Which implementation stands behind each seam is decided here and nowhere else. torch is imported only
when an engine is built: a router's process never loads it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import DEMO_MODEL, ClusterConfig
from cluster.faults import dial_of
from cluster.kv_transport import RankAddress, SharedTransport, endpoint_from_text, make_transport
from cluster.model_length import max_model_len
from cluster.ranks import RankLauncher
from engine.model.config import ModelConfig
from engine.weights import (
    ModelFolder,
    ModelSurvey,
    Progress,
    demo_model_path,
    resolve_model,
    survey_model,
)
from kv_transfer import (
    LayoutReader,
    LoopbackNetwork,
    PoolMemory,
    block_checksums,
    require_checksums,
)
from protocol.errors import StartupError
from protocol.ids import BlockId, Role, WorkerId, WorkerIdentity
from protocol.ports import Directory, KvReader, KvTransport
from rpc import Dial, StartupClock, WorkerProfile

if TYPE_CHECKING:
    from cluster.engine_parts import EngineParts
    from decode_worker import DecodeWorker
    from prefill_worker import PrefillWorker
    from router.router import Router


def open_model(config: ClusterConfig, progress: Progress | None = None) -> ModelFolder:
    """Find the model, converting a GGUF on its first use. Raises `StartupError`."""
    return resolve_model(_model_spec(config), cache_dir=_model_cache(config), progress=progress)


def survey_configured_model(config: ClusterConfig) -> ModelSurvey:
    """What `open_model` would find, without converting or downloading it. Raises `StartupError`."""
    return survey_model(_model_spec(config), cache_dir=_model_cache(config))


def _model_spec(config: ClusterConfig) -> str:
    return str(demo_model_path()) if config.model == DEMO_MODEL else config.model


def _model_cache(config: ClusterConfig) -> Path:
    return config.cache_dir.expanduser() / "models"


def build_prefill_worker(
    config: ClusterConfig,
    *,
    token: str,
    directory: Directory,
    replica_name: str,
    launcher: RankLauncher,
    network: LoopbackNetwork | None = None,
) -> PrefillWorker:
    """A prefill worker, loaded but not started. `launcher` starts its other ranks, where it has any;
    `network` as for `create_transport`.

    Raises `StartupError`.
    """
    from prefill_worker import PrefillWorker, PrefillWorkerConfig

    identity, startup = _new_identity(replica_name), StartupClock()
    parts = _load_engine(config, Role.PREFILL, identity, token, launcher=launcher, startup=startup)
    checksum = _checksum(config, parts)
    return PrefillWorker(
        profile=_profile(identity, parts, token, startup),
        make_engine=partial(parts.make_thread, "prefill-engine"),
        transport=_owner_transport(config, RankAddress(identity, launcher.host, network), parts),
        directory=directory,
        config=PrefillWorkerConfig(lease_s=config.kv_transfer.lease_s),
        checksum=partial(checksum, parts.pool_memory) if checksum else None,
    )


def build_decode_worker(
    config: ClusterConfig,
    *,
    token: str,
    directory: Directory,
    replica_name: str,
    launcher: RankLauncher,
    network: LoopbackNetwork | None = None,
) -> DecodeWorker:
    """A decode worker, loaded but not started; the arguments are those of `build_prefill_worker`.

    Raises `StartupError`.
    """
    from decode_worker import DecodeWorker, DecodeWorkerConfig, OnKvFailure

    identity, startup = _new_identity(replica_name), StartupClock()
    parts = _load_engine(config, Role.DECODE, identity, token, launcher=launcher, startup=startup)
    return DecodeWorker(
        profile=_profile(identity, parts, token, startup),
        make_engine=partial(parts.make_thread, "decode-engine"),
        reader=_reader(config, RankAddress(identity, launcher.host, network), parts, token),
        directory=directory,
        dial=dial_of(config, replica_name),
        config=DecodeWorkerConfig(
            on_kv_failure=OnKvFailure(config.kv_transfer.on_failure),
            fetch_limit_s=config.kv_transfer.fetch_timeout_s,
        ),
    )


def build_router(
    config: ClusterConfig, *, token: str, directory: Directory, dial: Dial | None = None
) -> Router:
    """A router, not started. Loads the tokenizer, but neither weights nor torch.

    `dial` opens the channels to workers; None: as the configuration says.
    """
    from router.router import Router
    from router.settings import RouterSettings
    from router.tokenizer import load_tokenizer

    folder = open_model(config)
    model = ModelConfig.from_hf(folder.config)
    return Router(
        settings=RouterSettings(
            max_in_flight=config.router.max_num_inflight,
            retry_after_s=config.router.overload_retry_after_s,
            request_timeout_s=config.router.deadline_s,
            worker_wait_s=config.router.worker_wait_s,
            num_retries=config.router.max_retries,
            max_num_choices=config.max_num_choices,
            frame_timeout_s=config.router.frame_timeout_s,
            local_prefill_tokens=config.router.local_prefill_tokens,
            local_prefill_on_failure=config.router.local_prefill_on_failure,
            prefill_grace_s=config.router.prefill_grace_s,
            max_body_bytes=config.http.max_body_bytes,
            api_key=read_api_key(config),
        ),
        directory=directory,
        tokenizer=load_tokenizer(folder.path),
        served_model_name=config.model_name,
        max_model_len=max_model_len(config, model),
        cluster_token=token,
        dial=dial or dial_of(config, "router"),
    )


def _load_engine(
    config: ClusterConfig,
    role: Role,
    identity: WorkerIdentity,
    token: str,
    *,
    launcher: RankLauncher,
    startup: StartupClock,
) -> EngineParts:
    """The engine of a worker whose process does nothing else, with all its ranks. Raises `StartupError`."""
    from cluster.engine_parts import build_engine
    from cluster.ranks.group import leading

    startup.end("imports")
    folder = open_model(config)
    startup.end("model")
    pool = config.pool(role)
    build = partial(build_engine, config, pool, folder, end_phase=startup.end)
    if config.layout_of(pool).num_ranks == 1:
        return build()
    with leading(config, role, identity, token, launcher) as team:
        return build(team=team)


def _owner_transport(config: ClusterConfig, mine: RankAddress, parts: EngineParts) -> KvTransport:
    """By it readers find the pools of all ranks."""
    transport = make_transport(config, mine, parts.pool_memory)
    others = parts.team.kv_sides
    return SharedTransport(transport, map(endpoint_from_text, others)) if others else transport


def _reader(config: ClusterConfig, mine: RankAddress, parts: EngineParts, token: str) -> KvReader:
    """By it all ranks read what their pools need."""
    from decode_worker import GroupReader, RankProxy

    make = partial(make_transport, config, mine)
    own = LayoutReader(parts.pool_memory, parts.fingerprint, make, checksum=_checksum(config, parts))
    addresses = parts.team.kv_sides
    others = [RankProxy(rank, address, token) for rank, address in enumerate(addresses, start=1)]
    return GroupReader(own, others, parts.fingerprint) if others else own


def _profile(
    identity: WorkerIdentity, parts: EngineParts, token: str, startup: StartupClock
) -> WorkerProfile:
    return WorkerProfile(
        identity=identity,
        fingerprint=parts.fingerprint,
        max_model_len=parts.scheduler.max_model_len,
        cluster_token=token,
        ops=parts.ops_name,
        startup=startup,
    )


def _new_identity(replica_name: str) -> WorkerIdentity:
    return WorkerIdentity(WorkerId(replica_name), secrets.token_hex(4))


def _checksum(
    config: ClusterConfig, parts: EngineParts
) -> Callable[[PoolMemory, Sequence[BlockId]], list[int]] | None:
    """How blocks are compared with their owners', where they are. Raises `StartupError`."""
    if not config.kv_transfer.checksum:
        return None
    require_checksums(parts.pool_memory)
    return block_checksums


def read_api_key(config: ClusterConfig) -> str | None:
    """The key that clients must show; None when none is asked for. Raises `StartupError`."""
    path = config.http.api_key_file
    if path is None:
        return None
    try:
        return path.expanduser().read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError) as error:
        raise StartupError(f"http.api_key_file {path} has no readable first line: {error}") from error
