"""`splitserve doctor`: what would go wrong, on this machine or on every node of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_options import Config, Port, RayAddress, Set, read_config
from protocol.errors import StartupError

USAGE_EXIT_CODE = 2


def doctor(
    *,
    config: Config = None,
    port: Port = None,
    ray_address: RayAddress = None,
    url: Annotated[
        str | None, typer.Option(help="Running service to ask as well, such as http://127.0.0.1:8000.")
    ] = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Find what would go wrong before traffic does. Exit code 1 when something would, 2 for bad usage.

    Looks at this machine, or at every node of the Ray cluster that the configuration names; at workers
    that run already; and reads KV blocks between fresh processes, with the time that it takes.
    """
    try:
        settings = read_config(config, {"http.port": port, "ray.address": ray_address}, set_)
    except StartupError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(USAGE_EXIT_CODE) from error
    from rich.console import Console

    from cluster import doctor as doctors

    with Console(stderr=True).status("looking") as status:
        diagnosis = doctors.diagnose(settings, url, status.update)
    if as_json:
        typer.echo(doctors.as_json(diagnosis))
    else:
        doctors.print_table(diagnosis, Console())
    raise typer.Exit(doctors.exit_code(diagnosis.findings))
