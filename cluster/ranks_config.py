"""The ranks of a worker in the configuration: how a model is dealt out to them, and how long they wait."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config_section import Section

PlacementStrategy = Literal["PACK", "STRICT_PACK"]


class RanksConfig(Section):
    """Workers whose model several ranks share: see `tensor_parallel_size` and `pipeline_parallel_size`."""

    communicator: Literal["auto", "tcp", "gloo", "nccl"] = "auto"
    """How ranks exchange tensors; auto: nccl on GPUs, else tcp, which takes a fraction of gloo's time."""
    expert_parallel: bool = False
    """Deal whole experts out to the ranks of a stage, instead of some columns of each."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long the ranks of a worker wait for each other while they load the model."""
    step_timeout_s: float = Field(default=30.0, gt=0)
    """A rank that takes no part in a step for so long is taken for lost, and its worker is replaced."""
