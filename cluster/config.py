"""The one configuration file: a laptop, `ray up` and KubeRay read the same.

Every value has a default, so an empty file is a valid configuration of the demo model. Unknown keys
and bad values are errors that name the path to the key, such as `decode.max_num_seqs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import StartupError
from protocol.ids import Role

DEMO_MODEL = "demo"
"""Stands for the small model that `make serve` installs."""

Port = Annotated[int, Field(ge=0, le=65535)]
"""0 takes a free one."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class HttpConfig(_Section):
    """Where clients connect."""

    host: str = "127.0.0.1"
    port: Port = 8000
    api_key_file: Path | None = None
    """File whose first line clients must send as `Authorization: Bearer`; null: no key asked for."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    through: Literal["router", "proxy"] = "router"
    """router: clients talk to the router's own server; proxy: to Ray Serve's proxy on any node."""


class RouterConfig(_Section):
    """Admission and the life of a request."""

    max_num_inflight: int = Field(default=512, ge=1)
    """Requests in the cluster at once; beyond it 429 with Retry-After."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest life of a request whose client names no deadline."""
    worker_wait_s: float = Field(default=30.0, gt=0)
    """How long a request waits for a worker of a role to appear, or to have room for it."""
    max_retries: int = Field(default=3, ge=0)
    overload_retry_after_s: float = Field(default=1.0, ge=0)
    """What a client that is refused for want of room is told to wait."""
    frame_timeout_s: float = Field(default=4.0, gt=0)
    """A worker from which nothing came for so long is taken for dead: what it did is done elsewhere."""
    local_prefill_tokens: int = Field(default=0, ge=0)
    """A prompt is computed where it is decoded when no more than so many of its tokens, by estimate, are
    not cached there; 0: never."""
    local_prefill_on_failure: bool = True
    """Let decode workers compute prompts when prefill workers fail, or there are none."""
    prefill_grace_s: float = Field(default=2.0, ge=0)
    """How long there must have been no prefill worker before decode workers do without."""
    max_num_choices: int = Field(default=16, ge=1)
    """Largest `n` of a request."""


class PoolConfig(_Section):
    """One pool of workers: all prefill workers, or all decode workers."""

    num_workers: int = Field(default=1, ge=1)
    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks of one worker; null: as many as its memory for them holds."""
    kv_cache_memory: ByteSize = ByteSize(512 * 2**20)
    """Bytes for KV blocks of one worker, such as 512MiB or 4GiB."""
    kv_cache_share: float | None = Field(default=None, gt=0, le=1)
    """Instead of `kv_cache_memory`: share of what is free on the device once the model is loaded."""
    policy: Literal["fcfs", "priority", "shortest_first"] = "fcfs"
    """Who is served first: the earliest, the smallest `priority` of the request, the least work left."""
    ageing_tokens: int = Field(default=32, ge=1)
    """shortest_first: so many tokens less must each later arrival have to do, to overtake."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """What becomes of the KV of a sequence that must give its blocks up."""
    swap_memory: ByteSize = ByteSize(0)
    """Host memory of one worker for swapped sequences; when it is full, they are recomputed."""
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
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Token budget of one engine step."""
    max_num_prefill_tokens: int | None = Field(default=None, ge=1)
    """Of these at most so many go to prompts, so that running sequences keep their pace; null: no bound."""
    threads: int | Literal["auto"] = "auto"
    """Threads of one engine; auto divides the machine's cores between the engines on it."""
    num_cpus: float = Field(default=1.0, ge=0)
    """What Ray reserves for one worker."""
    num_gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that place this pool, such as {"prefill_host": 1}."""
    host: str = "127.0.0.1"
    """Address that the workers' gRPC listens on and that other hosts reach; auto: the node's own."""
    max_surge_percent: int = Field(default=0, ge=0, le=100)
    """A rolling update starts so many workers before it stops any, where there is room for them; 0: each
    one begins to drain before its successor starts."""


class DecodePoolConfig(PoolConfig):
    """The decode workers."""

    max_num_prefill_tokens: int | None = Field(default=64, ge=1)
    """Of a step's tokens at most so many go to prompts that are computed here: short ones, those whose KV
    was lost, and all while no prefill worker lives. Bounds what they cost the others between two tokens."""


class KvTransferConfig(_Section):
    """How KV blocks move from prefill to decode workers."""

    transport: Literal["nixl", "loopback"] = "nixl"
    lease_s: float = Field(default=10.0, gt=0)
    """A held prompt is given up when its reader has not renewed for this long."""
    fetch_timeout_s: float = Field(default=30.0, gt=0)
    on_failure: Literal["recompute", "fail"] = "recompute"
    checksum: bool = False
    """Compare a checksum of every block that was read with its owner's. For pools in host memory."""


class RayConfig(_Section):
    """Which Ray cluster to run on."""

    address: str | None = None
    """null starts a local one; 'auto' or host:port joins one."""
    object_store_bytes: int = Field(default=100_000_000, ge=80_000_000)


class ClusterConfig(_Section):
    """Everything."""

    model: str = DEMO_MODEL
    """Hugging Face folder, .gguf file, hub id, or 'demo'."""
    served_model_name: str | None = None
    """What clients call it; null: 'demo', or the last part of `model`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens per KV block."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt + output; null: what the model was trained for."""
    enable_prefix_caching: bool = True
    cache_dir: Path = Path("~/.cache/splitserve")
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long `splitserve serve` waits for the first successful hand-off."""
    drain_limit_s: float = Field(default=60.0, ge=0)
    """How long a worker that is to end goes on with what runs there, before it hands the rest back."""
    http: HttpConfig = Field(default_factory=HttpConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    prefill: PoolConfig = Field(default_factory=PoolConfig)
    decode: DecodePoolConfig = Field(default_factory=DecodePoolConfig)
    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    ray: RayConfig = Field(default_factory=RayConfig)

    @model_validator(mode="after")
    def _choices_fit_a_batch(self) -> ClusterConfig:
        """A group that a decode worker could never seat would fail after its first tokens are out."""
        fits = min(self.prefill.max_num_seqs, self.decode.max_num_seqs)
        if self.router.max_num_choices > fits:
            raise ValueError(f"router.max_num_choices must be at most {fits}, the smaller max_num_seqs")
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf") or self.model

    def pool(self, role: Role) -> PoolConfig:
        return self.prefill if role is Role.PREFILL else self.decode


def load_config(path: Path | None, overrides: Mapping[str, object] | None = None) -> ClusterConfig:
    """Read a YAML file (null: the defaults) and lay `overrides`, keyed by dotted path, over it.

    Raises `StartupError` that names the file and the path to each bad key.
    """
    document = _read_document(path) if path else {}
    for dotted, value in (overrides or {}).items():
        _put(document, dotted.split("."), value)
    try:
        return ClusterConfig.model_validate(document)
    except ValidationError as error:
        source = str(path) if path else "the command line"
        raise StartupError(f"bad configuration in {source}:\n{_explain(error)}") from error


def _read_document(path: Path) -> dict[str, object]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
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
        inner = document.setdefault(key, {})
        if not isinstance(inner, dict):
            raise StartupError(f"{'.'.join(keys[: depth + 1])} is a value, not a section")
        document = inner
    document[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(top)"
        problem = "unknown key" if item["type"] == "extra_forbidden" else item["msg"]
        lines.append(f"  {path}: {problem}")
    return "\n".join(lines)
