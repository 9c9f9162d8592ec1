"""What `splitserve serve` prints: one line per step, and in the end what to try."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from cluster.config import DEMO_MODEL, ClusterConfig, PoolConfig
from cluster.router_config import HttpConfig
from protocol.ports import Clock

DEMO_IS_SMALL = "(135 million parameters, to try things out: often wrong, nonsense at temperature 1)"


@dataclass(slots=True)
class Report:
    """Lines with the seconds since the start. Used by the main thread only."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Clock = time.monotonic
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def step(self, text: str) -> None:
        self.out.write(f"{self.clock() - self.started_at:7.1f} s  {text}\n")
        self.out.flush()

    def headline(self, config: ClusterConfig) -> None:
        workers = f"{_num_workers(config.prefill)} prefill + {_num_workers(config.decode)} decode"
        self.out.write(f"splitserve: {config.model_name}, {workers} worker(s)\n")
        self.out.flush()

    def block(self, lines: list[str]) -> None:
        """Between empty lines, and without borders, so that it can be copied."""
        self.out.writelines(f"{line}\n" for line in ["", *lines, ""])
        self.out.flush()


def what_to_try(config: ClusterConfig, how_it_ends: str = "Ctrl-C stops everything") -> list[str]:
    """What is said at the end of a start."""
    url, model = f"{public_url(config)}/v1", config.model_name
    needs_key = config.http.api_key_file is not None
    key = f"$(head -n 1 {config.http.api_key_file})"
    header = [f'  -H "Authorization: Bearer {key}" \\'] if needs_key else []
    return [
        f"Ready: {model} at {url}",
        *([DEMO_IS_SMALL] if config.model == DEMO_MODEL else []),
        "",
        f"curl {url}/chat/completions \\",
        *header,
        "  -H 'Content-Type: application/json' \\",
        f'  -d \'{{"model": "{model}", "temperature": 0, "messages":',
        '       [{"role": "user", "content": "What is the capital of France?"}]}\'',
        "",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}", api_key="{"…" if needs_key else "none"}")',
        "for chunk in client.chat.completions.create(",
        f'        model="{model}", stream=True, temperature=0,',
        '        messages=[{"role": "user", "content": "Tell me a joke."}]):',
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
        "",
        f"{_own_command()} status{_port_flag(config)}    {how_it_ends}",
    ]


def public_url(config: ClusterConfig) -> str:
    """Where a client on this machine connects."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.http.host, config.http.host)  # noqa: S104
    return f"http://[{host}]:{config.http.port}" if ":" in host else f"http://{host}:{config.http.port}"


def _num_workers(pool: PoolConfig) -> str:
    """`2`, or `1 to 4` where the pool follows its load."""
    least, most = pool.least_num_workers, pool.most_num_workers
    return str(most) if least == most else f"{least} to {most}"


def _own_command() -> str:
    """How to call this program again from where it was called: it need not be on the PATH."""
    found = shutil.which(Path(sys.argv[0]).name)
    return Path(sys.argv[0]).name if found else os.path.relpath(sys.argv[0])


def _port_flag(config: ClusterConfig) -> str:
    return "" if config.http.port == HttpConfig().port else f" --port {config.http.port}"
