"""How the cluster is brought to machines: read by `splitserve render` and `deploy`, by no running part."""

from __future__ import annotations

from pydantic import Field

from cluster.config_section import Section
from cluster.deploy_kuberay import KubeRay
from cluster.deploy_names import Image
from cluster.deploy_ray_up import RayUp


class DeployConfig(Section):
    """Where the cluster is brought to: read by `splitserve render` and `deploy`, by no running part."""

    name: str = Field(default="splitserve", pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")
    """What the cluster is called there; small letters, digits and dashes."""
    image: Image = "splitserve:0.1.0"
    """Container image with this version of Splitserve, built from deploy/Dockerfile."""
    kuberay: KubeRay = Field(default_factory=KubeRay)
    ray_up: RayUp = Field(default_factory=RayUp)
