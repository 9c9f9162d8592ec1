"""What `splitserve render ray-up` needs to know beside the cluster itself."""

from __future__ import annotations

from cluster.config_section import Section


class RayUp(Section):
    """A cluster that `ray up` starts over ssh."""
