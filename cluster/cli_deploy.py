"""`splitserve deploy` and `splitserve undeploy`: on and off a Ray cluster that runs already."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_options import Config, Port, Set, read_config

ListenPort = Annotated[int | None, typer.Option(help="Port to listen on (default: 8000).")]
HeadAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Ray cluster, host:port (default: the one of this machine)."),
]


def deploy(
    *, config: Config = None, port: ListenPort = None, ray_address: HeadAddress = None, set_: Set = None
) -> None:
    """Bring the application to a running Ray cluster, or update it there; returns when it is ready.

    Run it on the head node. An update replaces only what the changed configuration concerns.
    """
    settings = read_config(config, {"http.port": port, "ray.address": ray_address}, set_)
    from cluster.deploy_command import deploy_cluster
    from cluster.serve_progress import Report

    deploy_cluster(settings, Report())


def undeploy(
    *, config: Config = None, port: Port = None, ray_address: HeadAddress = None, set_: Set = None
) -> None:
    """Take the application off its Ray cluster, which runs on. What is being generated may end."""
    settings = read_config(config, {"http.port": port, "ray.address": ray_address}, set_)
    from cluster.deploy_command import undeploy_cluster
    from cluster.serve_progress import Report

    undeploy_cluster(settings, Report())
