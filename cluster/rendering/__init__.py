"""From the one configuration to the files of `ray up`, KubeRay and `serve deploy`. Pure: starts nothing.

config --clustered--> the same for several hosts --+--> serve_config   what Serve runs, everywhere
                                                   +--> kuberay.yaml   machines from Kubernetes
                                                   +--> ray-up.yaml    machines over ssh
"""

from cluster.rendering.clustered import clustered, for_deployment, is_prepared_for, pool_resources
from cluster.rendering.files import Files, as_stream, render_files, write_files
from cluster.rendering.serve_config import APPLICATION, serve_arguments, serve_config

__all__ = [
    "APPLICATION",
    "Files",
    "as_stream",
    "clustered",
    "for_deployment",
    "is_prepared_for",
    "pool_resources",
    "render_files",
    "serve_arguments",
    "serve_config",
    "write_files",
]
