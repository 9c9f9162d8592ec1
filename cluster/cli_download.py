"""`splitserve download`: have the model there before anything starts, such as in a pod's init container."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_options import Config, Set, read_config


def download(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Model folder, .gguf file, hub id, or 'demo' (default: demo).")
    ] = None,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Find the model, downloading or converting it if that has not been done, and say where it is.

    Does nothing when it is there already, so that it may run before every start. Hub models go to
    HF_HOME, converted .gguf files to `cache_dir`.
    """
    flags = {"model": model}
    settings = read_config(config, flags, set_)
    from cluster.compose import open_model
    from engine.weights import console_progress

    folder = open_model(settings, console_progress())
    _ = folder.tokenizer_path  # raises what a router would raise later
    typer.echo(f"the model is at {folder.path}")
