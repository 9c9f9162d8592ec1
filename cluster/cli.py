"""The command line, `splitserve --help`. Heavy modules are imported by the commands that need them."""

from __future__ import annotations

import errno
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_deploy import deploy, undeploy
from cluster.cli_doctor import doctor
from cluster.cli_download import download
from cluster.cli_options import (
    Config,
    DecodePipelineParallel,
    DecodeTensorParallel,
    PipelineParallel,
    Port,
    PrefillPipelineParallel,
    PrefillTensorParallel,
    RayAddress,
    Set,
    TensorParallel,
    read_config,
)
from cluster.cli_render import render
from protocol.errors import SplitserveError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM serving with prefill and decode on different workers.",
)

Host = Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")]
_NOT_WRITTEN = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
"""What a disk, or a pipe to one, says to output; files that we write ourselves raise `StartupError`."""

ListenPort = Annotated[
    int | None, typer.Option(help="Port to listen on; 0 takes a free one (default: 8000).")
]


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Say the version.")] = False) -> None:
    if version:
        typer.echo(metadata.version("splitserve"))
        raise typer.Exit


@app.command()
def serve(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Model folder, .gguf file, hub id, or 'demo' (default: demo).")
    ] = None,
    config: Config = None,
    host: Host = None,
    port: ListenPort = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16 (default: auto).")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block (default: 16).")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences per worker and step, of both pools (default: 64).")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step, of both pools (default: 512).")
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(help="Tokens of a long prompt per step while others wait, of both pools.")
    ] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="For KV blocks, per rank of both pools, such as 512MiB (default).")
    ] = None,
    scheduling_policy: Annotated[
        str | None, typer.Option(help="fcfs, priority or shortest_first, in both pools (default: fcfs).")
    ] = None,
    prefill_workers: Annotated[
        int | None, typer.Option(help="Number of prefill workers (default: 1).")
    ] = None,
    decode_workers: Annotated[
        int | None, typer.Option(help="Number of decode workers (default: 1).")
    ] = None,
    tensor_parallel_size: TensorParallel = None,
    prefill_tensor_parallel_size: PrefillTensorParallel = None,
    decode_tensor_parallel_size: DecodeTensorParallel = None,
    pipeline_parallel_size: PipelineParallel = None,
    prefill_pipeline_parallel_size: PrefillPipelineParallel = None,
    decode_pipeline_parallel_size: DecodePipelineParallel = None,
    kv_transport: Annotated[
        str | None, typer.Option(help="How KV moves: nixl (default), gloo, or nccl.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; none starts one here.")
    ] = None,
    set_: Set = None,
) -> None:
    """Start a cluster and serve the OpenAI API until Ctrl-C.

    Flags for sizes set both pools; `--set prefill.KEY=VALUE` or `--set decode.KEY=VALUE` sets one.
    `splitserve config` lists all keys.
    """
    flags = {
        "model": model,
        "http.host": host,
        "http.port": port,
        "http.api_key_file": api_key_file,
        "dtype": dtype,
        "served_model_name": served_model_name,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "prefill.max_num_seqs": max_num_seqs,
        "decode.max_num_seqs": max_num_seqs,
        "prefill.max_num_batched_tokens": max_num_batched_tokens,
        "decode.max_num_batched_tokens": max_num_batched_tokens,
        "prefill.long_prefill_token_threshold": long_prefill_token_threshold,
        "decode.long_prefill_token_threshold": long_prefill_token_threshold,
        "prefill.kv_cache_memory": kv_cache_memory,
        "decode.kv_cache_memory": kv_cache_memory,
        "prefill.policy": scheduling_policy,
        "decode.policy": scheduling_policy,
        "prefill.num_workers": prefill_workers,
        "decode.num_workers": decode_workers,
        "tensor_parallel_size": tensor_parallel_size,
        "prefill.tensor_parallel_size": prefill_tensor_parallel_size,
        "decode.tensor_parallel_size": decode_tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "prefill.pipeline_parallel_size": prefill_pipeline_parallel_size,
        "decode.pipeline_parallel_size": decode_pipeline_parallel_size,
        "kv_transfer.transport": kv_transport,
        "ray.address": ray_address,
    }
    settings = read_config(config, flags, set_)
    from cluster.serve_command import serve_cluster
    from cluster.serve_progress import Report

    serve_cluster(settings, Report())


@app.command()
def status(
    *,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address that the server was given.")] = None,
    port: Port = None,
    ray_address: RayAddress = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show a server that starts or runs, and its workers. Exit code 1 unless it is ready."""
    flags = {"http.host": host, "http.port": port, "ray.address": ray_address}
    settings = read_config(config, flags, set_)
    from cluster import status as status_module

    seen = status_module.look(settings)
    typer.echo(status_module.as_json(seen) if as_json else status_module.as_table(seen))
    if not seen.ready:
        raise typer.Exit(1)


@app.command(name="config")
def show_config(*, config: Config = None, set_: Set = None) -> None:
    """Print the configuration with the meaning of every key, as a file to begin with."""
    settings = read_config(config, {}, set_)
    from cluster.config_reference import as_yaml

    typer.echo(as_yaml(settings), nl=False)


@app.command()
def drain(
    *,
    worker: Annotated[
        str, typer.Argument(help="As `splitserve status` shows it, or the beginning of that.")
    ],
    limit: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds until what still runs is handed back (default: 60)."),
    ] = None,
    config: Config = None,
    port: Port = None,
    ray_address: RayAddress = None,
    set_: Set = None,
) -> None:
    """Let a worker end its work; it is then replaced. Exit code 1 if it is not gone in time."""
    flags = {"http.port": port, "ray.address": ray_address, "drain_limit_s": limit}
    settings = read_config(config, flags, set_)
    from cluster.attachment import find_cluster
    from cluster.drain import drain_cluster_worker

    cluster = find_cluster(settings)
    with cluster.joined():
        is_gone = drain_cluster_worker(cluster.cluster_token, worker, settings.drain_limit_s, typer.echo)
    if not is_gone:
        raise typer.Exit(1)


@app.command()
def verify(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Model folder, .gguf file, hub id, or 'demo' (default: demo).")
    ] = None,
    config: Config = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16 (default: auto).")] = None,
    tensor_parallel_size: TensorParallel = None,
    prefill_tensor_parallel_size: PrefillTensorParallel = None,
    decode_tensor_parallel_size: DecodeTensorParallel = None,
    pipeline_parallel_size: PipelineParallel = None,
    prefill_pipeline_parallel_size: PrefillPipelineParallel = None,
    decode_pipeline_parallel_size: DecodePipelineParallel = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each.")] = 48,
    url: Annotated[
        str | None, typer.Option(help="Running server to verify instead, such as http://127.0.0.1:8000.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that --url asks for.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="Compare with transformers as well.")] = True,
    set_: Set = None,
) -> None:
    """Check that prefill + decode give the tokens of one engine and of transformers. Exit code 1 if not.

    Starts engines of its own in this process, and needs no server. With --url a running server takes the
    place of prefill + decode; the model must then be the one that it serves.
    """
    flags = {
        "model": model,
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "prefill.tensor_parallel_size": prefill_tensor_parallel_size,
        "decode.tensor_parallel_size": decode_tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "prefill.pipeline_parallel_size": prefill_pipeline_parallel_size,
        "decode.pipeline_parallel_size": decode_pipeline_parallel_size,
        "http.api_key_file": api_key_file,
    }
    settings = read_config(config, flags, set_)
    from rich.console import Console

    from cluster.verify import VerifyOptions, verify

    options = VerifyOptions(prompts, max_tokens, url, reference)
    if not verify(settings, options, Console()):
        raise typer.Exit(1)


app.command()(render)
app.command()(download)
app.command()(doctor)
app.command()(deploy)
app.command()(undeploy)


def main() -> None:
    """Entry point of the console script."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # a full disk shows here, and not at the interpreter's end
    except SplitserveError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the end flushes once more
        typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
