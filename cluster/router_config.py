"""What the router is told: where clients connect, and how many of their requests it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cluster.config_section import Section
from cluster.deploy_names import RayResources

Port = Annotated[int, Field(ge=0, le=65535)]
"""0 takes a free one."""


class HttpConfig(Section):
    """Where clients connect."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine."""
    port: Port = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: Path | None = None
    """File whose first line clients must send as `Authorization: Bearer`; null: no key asked for."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Longest body of a request; a longer one is answered with 413."""
    head_timeout_s: float = Field(default=10.0, gt=0)
    """How long a client may take to send the head of a request. The router's own server only."""
    read_timeout_s: float = Field(default=30.0, gt=0)
    """A client that leaves a full buffer unread for so long is cut off, its request aborted. As above."""
    through: Literal["router", "proxy"] = "router"
    """router: clients talk to the router's own server; proxy: to Ray Serve's proxy on any node."""


class RouterConfig(Section):
    """Admission and the life of a request."""

    max_num_inflight: int = Field(default=512, ge=1)
    """Requests in the cluster at once; beyond it 429 with Retry-After."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest life of a request whose client names no deadline."""
    worker_wait_s: float = Field(default=30.0, gt=0)
    """How long a request waits for a worker of a role to appear, or to have room for it."""
    max_retries: int = Field(default=3, ge=0)
    """How often in a row a request goes on elsewhere after a worker failed it, without getting on."""
    overload_retry_after_s: float = Field(default=1.0, ge=0)
    """What a client that is refused for want of room is told to wait."""
    frame_timeout_s: float = Field(default=4.0, gt=0)
    """A worker from which nothing came for so long is taken for dead: what it did is done elsewhere."""
    local_prefill_tokens: int = Field(default=0, ge=0)
    """A prompt is computed where it is decoded when no more than so many of its tokens, by estimate, are
    not cached there; 0: never. `make bench-handoff ARGS="--only local_prefill"` tells where that pays."""
    local_prefill_on_failure: bool = True
    """Let decode workers compute prompts when prefill workers fail, or there are none."""
    prefill_grace_s: float = Field(default=2.0, ge=0)
    """How long there must have been no prefill worker before decode workers do without."""
    max_num_choices: int | None = Field(default=None, ge=1)
    """Largest `n` of a request; null: 16, or the smaller of both pools' `max_num_seqs` if that is less."""
    resources: RayResources = Field(default_factory=dict)
    """Custom Ray resources that place the router. `splitserve deploy` puts it on the head node if empty."""
