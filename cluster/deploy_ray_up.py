"""What `splitserve render ray-up` needs to know beside the cluster itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cluster.config_section import Section
from cluster.deploy_names import Host, Hosts, Variables


class HeadNode(Section):
    """The head node: Ray's control plane and the router. It computes nothing."""

    host: Host = ""
    """local: address by which the other hosts reach it, and ssh."""
    instance_type: str = ""
    """aws, gcp: kind of machine, without a GPU."""
    node_config: dict[str, Any] = Field(default_factory=dict)
    """aws, gcp: more of what the provider takes for an instance, laid over what is rendered."""


class PoolHosts(Section):
    """The hosts of one pool. A worker is placed where its pool's hosts are, and nowhere else."""

    hosts: Hosts = Field(default_factory=list)
    """local: their addresses. A host may be in both pools."""
    num_hosts: int = Field(default=1, ge=1)
    """aws, gcp: so many are kept running."""
    max_num_hosts: int | None = Field(default=None, ge=1)
    """aws, gcp: so many are started when workers find no place; null: as `num_hosts`."""
    instance_type: str = ""
    """aws, gcp: kind of machine."""
    node_config: dict[str, Any] = Field(default_factory=dict)
    """aws, gcp: more of what the provider takes for an instance, laid over what is rendered."""


class RayUp(Section):
    """A cluster that `ray up` starts over ssh."""

    provider: Literal["local", "aws", "gcp"] = "local"
    """local: machines that run already and answer ssh; aws and gcp: instances that Ray starts and ends."""
    ssh_user: str = "ubuntu"
    """Who logs in on the hosts."""
    ssh_private_key: Path | None = None
    """The key for that, on the machine where `ray up` is called; null: Ray makes one (aws, gcp only)."""
    auth_token_file: Path = Path("~/.ray/auth_token")
    """Secret that opens the Ray cluster, where `ray up` is called: `ray get-auth-token --generate`."""
    config_file: Path = Path("splitserve.yaml")
    """This configuration, as seen from where `ray up` is called; on all hosts `~/splitserve.yaml`."""
    package: Path | None = None
    """Wheel of Splitserve (`pip wheel --no-deps -w dist .`), or a checkout without `.venv`, to copy to all
    hosts and install there; null: they have it."""
    pins: Path | None = None
    """Pinned requirements for that, such as requirements/serve.txt; null: what its own bounds allow."""
    file_mounts: dict[str, str] = Field(default_factory=dict)
    """More to copy to all hosts, such as a model: path there to path here."""
    setup_commands: list[str] = Field(default_factory=list)
    """What to run on each new host before Splitserve is installed."""
    environment: Variables = Field(default_factory=dict)
    """Variables of all nodes and workers, such as UCX_TLS and UCX_NET_DEVICES."""
    dashboard: bool = True
    """Run Ray's dashboard on the head node. Ray's `serve` commands ask it; Splitserve's do without."""
    region: str = ""
    """aws, gcp: where."""
    zone: str = ""
    """aws, gcp: which zone of it; on aws several may be given, with commas between."""
    project_id: str | None = None
    """gcp: whose project."""
    image: str = ""
    """aws: AMI; gcp: source image, with drivers if the hosts have GPUs. Empty on aws: Ray's default."""
    disk_gb: int = Field(default=200, ge=20)
    """aws, gcp: size of each host's disk."""
    head: HeadNode = Field(default_factory=HeadNode)
    prefill: PoolHosts = Field(default_factory=PoolHosts)
    decode: PoolHosts = Field(default_factory=PoolHosts)
