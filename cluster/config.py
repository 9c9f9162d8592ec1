"""The one configuration file: a laptop, `ray up` and KubeRay read the same.

Every value has a default, so an empty file is a valid configuration of the demo model. Unknown keys
and bad values are errors that name the path to the key, such as `decode.max_num_seqs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ByteSize, Field, ValidationError, model_validator

from cluster.config_errors import explain
from cluster.config_section import Section
from cluster.deploy_config import DeployConfig
from cluster.deploy_names import RayResources
from cluster.faults_config import FaultsConfig
from cluster.ranks_config import PlacementStrategy, RanksConfig
from cluster.ray_address import RayAddress
from cluster.router_config import HttpConfig, RouterConfig
from cluster.unique_keys import load_yaml
from protocol.errors import StartupError
from protocol.ids import Role
from protocol.rank_layout import RankLayout

DEMO_MODEL = "demo"
"""Stands for the small model that `make serve` installs."""

DEFAULT_MAX_NUM_CHOICES = 16

BlockSize = Literal[8, 16, 32, 64, 128]
Dtype = Literal["auto", "float32", "bfloat16"]


class AutoscalingConfig(Section):
    """Lets a pool follow its load. Without `max_workers` it has `num_workers`, always."""

    min_workers: int = Field(default=1, ge=1)
    """Never fewer; the pool begins with so many."""
    max_workers: int | None = Field(default=None, ge=1)
    """Never more; null: no autoscaling."""
    target_wait_s: float = Field(default=2.0, gt=0)
    """Prefill: more workers once a new prompt would wait longer for those before it."""
    target_use: float = Field(default=0.8, gt=0, le=1)
    """More workers once a larger share is in use: of their time (prefill), of their KV blocks (decode)."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    """After so long of too much load, workers are added."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """After so long in which fewer would have done, one in four is drained, one at least."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> AutoscalingConfig:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers is {self.max_workers}, but min_workers is {self.min_workers}")
        return self


class PoolConfig(Section):
    """One pool of workers: all prefill workers, or all decode workers."""

    num_workers: int = Field(default=1, ge=1)
    """Workers, each with a model and KV blocks of its own."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Instead of the cluster's `tensor_parallel_size`. The pools may differ."""
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    """Instead of the cluster's `pipeline_parallel_size`."""
    placement_strategy: PlacementStrategy = "PACK"
    """Where Ray puts the ranks of one worker: on one node if there is room, or (`STRICT_PACK`) never on
    several."""
    autoscaling: AutoscalingConfig = Field(default_factory=AutoscalingConfig)
    dtype: Dtype | None = None
    """Instead of the cluster's `dtype`. Where the pools differ, KV is converted on its way."""
    block_size: BlockSize | None = None
    """Instead of the cluster's `block_size`."""
    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks of one worker; null: as many as its memory for them holds."""
    kv_cache_memory: ByteSize = ByteSize(512 * 2**20)
    """Bytes for KV blocks of one rank, such as 512MiB or 4GiB. A worker has one rank unless
    `tensor_parallel_size` or `pipeline_parallel_size` says otherwise."""
    kv_cache_share: float | None = Field(default=None, gt=0, le=1)
    """Instead of `kv_cache_memory`: share of what is free on the device once the model is loaded."""
    policy: Literal["fcfs", "priority", "shortest_first"] = "fcfs"
    """Who is served first: the earliest, the smallest `priority` of the request, the least work left."""
    ageing_tokens: int = Field(default=32, ge=1)
    """shortest_first: so many tokens less must each later arrival have to do, to overtake."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """What becomes of the KV of a sequence that must give its blocks up."""
    swap_memory: ByteSize = ByteSize(0)
    """Host memory of one rank for swapped sequences; when it is full, they are recomputed."""
    low_watermark: float = Field(default=0.01, ge=0, lt=1)
    """Share of the blocks that an admission leaves free for the growth of those that run."""
    high_watermark: float = Field(default=0.04, ge=0, lt=1)
    """Once fewer than the low watermark are free, nobody is admitted until so many are."""
    max_num_waiting: int = Field(default=1024, ge=1)
    """Sequences that may wait in one worker; the next one is told to come back later."""
    overload_retry_after_s: float = Field(default=1.0, gt=0)
    """So much later."""
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """A longer prompt computes at most so many tokens per step while others wait; 0: no bound."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that one engine step computes at most; each choice of a request is one."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Token budget of one engine step."""
    max_num_prefill_tokens: int | None = Field(default=None, ge=1)
    """Of these at most so many go to prompts, so that running sequences keep their pace; null: no bound."""
    threads: int | Literal["auto"] = "auto"
    """Threads of one rank; auto divides the machine's cores between all ranks that may run there."""
    num_cpus: float = Field(default=1.0, ge=0)
    """What Ray reserves for one rank."""
    num_gpus: float = Field(default=0.0, ge=0)
    """What Ray reserves for one rank; above 0 it computes on the GPU."""
    resources: RayResources = Field(default_factory=dict)
    """Custom Ray resources that place the ranks of this pool, such as {"prefill_host": 1}."""
    host: str = "127.0.0.1"
    """Address that the workers' gRPC listens on and that other hosts reach; auto: the node's own."""
    max_surge_percent: int = Field(default=0, ge=0, le=100)
    """A rolling update starts so many workers before it stops any, where there is room for them; 0: each
    one begins to drain before its successor starts."""

    @property
    def least_num_workers(self) -> int:
        """What the pool has at its start, and without load."""
        return self.num_workers if self.autoscaling.max_workers is None else self.autoscaling.min_workers

    @property
    def most_num_workers(self) -> int:
        """What it may grow to."""
        return self.autoscaling.max_workers or self.num_workers


class DecodePoolConfig(PoolConfig):
    """The decode workers."""

    max_num_prefill_tokens: int | None = Field(default=64, ge=1)
    """Of a step's tokens at most so many go to prompts that are computed here: short ones, those whose KV
    was lost, and all while no prefill worker lives. Bounds what they cost the others between two tokens."""


class KvTransferConfig(Section):
    """How KV blocks move from prefill to decode workers."""

    transport: Literal["nixl", "gloo", "nccl", "loopback"] = "nixl"
    """nixl between processes; where it does not run, torch.distributed: gloo for pools in host memory, nccl
    for pools on GPUs; loopback only inside of one process, for tests and `splitserve verify`."""
    lease_s: float = Field(default=10.0, gt=0)
    """A held prompt is given up when its reader has not renewed for this long."""
    fetch_timeout_s: float = Field(default=30.0, gt=0)
    """How long one read of a prompt's KV may take."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """When a prompt's KV cannot be read: compute it again on the decode worker, or fail the request."""
    checksum: bool = False
    """Compare a checksum of every block that was read with its owner's. For pools in host memory, and
    workers of one rank."""


class RayConfig(Section):
    """Which Ray cluster to run on."""

    address: RayAddress | None = None
    """null starts a local one; 'auto' or host:port joins one."""
    object_store_bytes: int = Field(default=100_000_000, ge=80_000_000)
    """Shared memory for the object store of a local cluster; nothing of a request passes through it."""


class ClusterConfig(Section):
    """Everything."""

    model: str = DEMO_MODEL
    """Hugging Face folder, .gguf file, hub id, or 'demo'."""
    served_model_name: str | None = None
    """What clients call it; null: 'demo', or the last part of `model`."""
    dtype: Dtype = "auto"
    """Number type of weights and KV; auto: bfloat16 where the hardware multiplies it, else float32."""
    block_size: BlockSize = 16
    """Tokens per KV block."""
    attention: Literal["triton", "flashinfer", "flash_attn_4"] = "triton"
    """What attends on GPUs: own kernels, or a library (`pip install 'splitserve[flashinfer]'` or
    `'splitserve[flash-attn-4]'`), which takes no float32, and whose decode steps are not captured."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks (processes, or GPUs) that share each layer of one worker's model, by heads."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages of one worker's model, each with layers and ranks of its own."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt + output; null: what the model was trained for."""
    enable_prefix_caching: bool = True
    """Keep the KV of prompts for others that begin alike."""
    cache_dir: Path = Path("~/.cache/splitserve")
    """Where converted models and compiled kernels are kept."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long `splitserve serve` waits for the first successful hand-off."""
    drain_limit_s: float = Field(default=60.0, ge=0)
    """How long a worker that is to end goes on with what runs there, before it hands the rest back."""
    http: HttpConfig = Field(default_factory=HttpConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    prefill: PoolConfig = Field(default_factory=PoolConfig)
    decode: DecodePoolConfig = Field(default_factory=DecodePoolConfig)
    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    ranks: RanksConfig = Field(default_factory=RanksConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    deploy: DeployConfig = Field(default_factory=DeployConfig)

    @model_validator(mode="after")
    def _choices_fit_a_batch(self) -> ClusterConfig:
        """A group that a decode worker could never seat would fail after its first tokens are out."""
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if self.max_num_choices > pool.max_num_seqs:
                raise ValueError(
                    f"router.max_num_choices is {self.max_num_choices}, but {name}.max_num_seqs is"
                    f" {pool.max_num_seqs}, and all choices of a request run together: lower the one or"
                    " raise the other"
                )
        return self

    @model_validator(mode="after")
    def _checksums_are_of_whole_blocks(self) -> ClusterConfig:
        """A rank has a part of each block, and the other side's ranks may have other parts."""
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            layout = self.layout_of(pool)
            if self.kv_transfer.checksum and layout.num_ranks > 1:
                raise ValueError(
                    f"kv_transfer.checksum compares whole blocks, but {name} workers have"
                    f" {layout.num_ranks} ranks: leave it out, or leave out tensor_parallel_size and"
                    " pipeline_parallel_size"
                )
        return self

    @property
    def max_num_choices(self) -> int:
        """Largest `n` of a request."""
        if self.router.max_num_choices is not None:
            return self.router.max_num_choices
        return min(DEFAULT_MAX_NUM_CHOICES, self.prefill.max_num_seqs, self.decode.max_num_seqs)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf") or self.model

    def dtype_of(self, pool: PoolConfig) -> Dtype:
        return pool.dtype or self.dtype

    def block_size_of(self, pool: PoolConfig) -> int:
        return pool.block_size or self.block_size

    def layout_of(self, pool: PoolConfig) -> RankLayout:
        """How the model of a pool's workers is dealt out to ranks."""
        return RankLayout(
            pool.tensor_parallel_size or self.tensor_parallel_size,
            pool.pipeline_parallel_size or self.pipeline_parallel_size,
        )

    def pool(self, role: Role) -> PoolConfig:
        return self.prefill if role is Role.PREFILL else self.decode


def load_config(
    path: Path | None,
    overrides: Mapping[str, object] | None = None,
    overrides_are_from: str = "on the command line",
) -> ClusterConfig:
    """Read a YAML file (null: the defaults) and lay `overrides`, keyed by dotted path, over it.

    Raises `StartupError` that says where each bad key stands, and what it is called.
    """
    document = _read_document(path) if path else {}
    for dotted, value in (overrides or {}).items():
        _put(document, dotted.split("."), value)
    try:
        return ClusterConfig.model_validate(document)
    except ValidationError as error:
        where = dict.fromkeys(overrides or (), overrides_are_from)
        problems = explain(error, ClusterConfig, where, f"in {path}" if path else overrides_are_from)
        raise StartupError(f"bad configuration:\n{problems}") from error


def _read_document(path: Path) -> dict[str, object]:
    try:
        document = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise StartupError(f"{path} must hold a mapping at its top, not a {type(document).__name__}")
    return document


def _put(document: dict[str, object], keys: list[str], value: object) -> None:
    for depth, key in enumerate(keys[:-1]):
        if document.get(key) is None:
            document[key] = {}
        inner = document[key]
        if not isinstance(inner, dict):
            raise StartupError(f"{'.'.join(keys[: depth + 1])} is a value, not a section")
        document = inner
    document[keys[-1]] = value
