"""What `splitserve render kuberay` needs to know beside the cluster itself."""

from __future__ import annotations

from cluster.config_section import Section


class KubeRay(Section):
    """A RayService on Kubernetes, kept by the KubeRay operator (1.5 or newer)."""

    namespace: str = "default"
    """Namespace of everything that is rendered."""
