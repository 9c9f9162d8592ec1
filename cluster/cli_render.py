"""`splitserve render`: the configuration as what `ray up`, `kubectl apply` and `serve deploy` take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import Config, Set, read_config
from protocol.errors import StartupError


class Target(StrEnum):
    """For whom to render."""

    RAY_UP = "ray-up"
    KUBERAY = "kuberay"
    SERVE = "serve"


Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to write into; - is the terminal.")
]


def render(
    *,
    target: Annotated[
        Target,
        typer.Argument(help="`ray up`, the KubeRay operator, or `serve deploy` on a running cluster."),
    ],
    config: Config = None,
    set_: Set = None,
    output: Output = "-",
) -> None:
    """Write the files that bring this configuration to a cluster. Starts nothing, and needs no cluster."""
    settings = read_config(config, {}, set_)
    from cluster.rendering import as_stream, render_files, write_files

    files = render_files(target.value, settings)
    if not output:
        raise StartupError("--output is empty: name a folder, or - for the terminal")
    if output == "-":
        typer.echo(as_stream(files), nl=False)
        return
    for path in write_files(files, Path(output)):
        typer.echo(f"wrote {path}")
