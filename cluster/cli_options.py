"""What the commands share: how the configuration is named on the command line, and read from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import StartupError

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

Config = Annotated[Path | None, typer.Option("--config", help="YAML file; flags override it.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any value of the file, such as decode.num_workers=2."),
]

Port = Annotated[int | None, typer.Option(help="Port of the server (default: 8000).")]
RayAddress = Annotated[str | None, typer.Option(help="Ray cluster to ask, host:port or auto.")]

TensorParallel = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks that share each layer of a worker, of both pools (default: 1)."),
]
PrefillTensorParallel = Annotated[
    int | None, typer.Option(min=1, help="The same of prefill workers alone.")
]
DecodeTensorParallel = Annotated[int | None, typer.Option(min=1, help="The same of decode workers alone.")]
PipelineParallel = Annotated[
    int | None, typer.Option(min=1, help="Stages of a worker's model, of both pools (default: 1).")
]
PrefillPipelineParallel = Annotated[
    int | None, typer.Option(min=1, help="The same of prefill workers alone.")
]
DecodePipelineParallel = Annotated[
    int | None, typer.Option(min=1, help="The same of decode workers alone.")
]


def read_config(
    path: Path | None, flags: Mapping[str, object], settings: list[str] | None
) -> ClusterConfig:
    """The configuration: file, then flags, then `--set`; flags that were not given change nothing.

    Raises `StartupError`.
    """
    from cluster.config import load_config

    given = {key: value for key, value in flags.items() if value is not None}
    return load_config(path, given | dict(map(parse_setting, settings or ())))


def parse_setting(text: str) -> tuple[str, object]:
    """('a.b', value) of 'a.b=value'; the value is YAML, so that 2, true and null are what they look."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise StartupError(f"--set {text!r} must look like key=value, such as decode.num_workers=2")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise StartupError(f"--set {key}: {value!r} is not valid YAML") from error
