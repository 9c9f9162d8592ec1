"""Does a cluster under fire ever give a wrong answer, hang, or lose a block? One run; exit code 0 is "no".

    make soak [SECONDS=60] [FAULT_EVERY=2] [ARGS="--seed 7 --checksums --late --without-validation"]

Two prefill and two decode workers, each a process, with a tiny random model in float32; the router and its
HTTP server are here. Clients keep the cluster at about 70 % of its load, and every completed answer must be
the one that a lone engine gave before: tokens, log-probabilities, finish reasons, usage. The last line is a
summary. With --without-validation decode workers believe in KV that its owner has given up: the run must
fail, which shows that it can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# The root last: without it, the folders of tests would be taken for the packages of the same name.
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent / "engine"), str(FOLDER.parent.parent)]

import httpx  # noqa: E402
from soak_cases import MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS, make_cases  # noqa: E402
from soak_clients import Clients, Judged, Outcome  # noqa: E402
from soak_faults import FaultInjector  # noqa: E402
from soak_golden import golden_answers  # noqa: E402
from soak_streams import RouterStreams  # noqa: E402
from tiny_clusters import tiny_config, tiny_model  # noqa: E402

from cluster.config import ClusterConfig  # noqa: E402
from cluster.environment import override  # noqa: E402
from cluster.processes import ProcessCluster  # noqa: E402
from protocol.errors import SplitserveError  # noqa: E402

NUM_CASES = 200
LOAD = 0.7
TRIED_CONCURRENCIES = (2, 4, 8, 16)
TRY_S = 2.0
MIN_COMPLETED = 0.99
IDLE_S = 30.0
LEASE_S = 3.0
LATE_LEASE_S = 0.5
LATE_PREFILL_BLOCKS = 60
"""Few, so that blocks which were given up soon hold something else."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    seconds: float
    fault_every_s: float
    seed: int
    checksum: bool
    late: bool
    without_validation: bool
    folder: Path | None

    @property
    def build(self) -> str:
        if self.without_validation:
            return "soak_workers:build_blind"
        return "soak_workers:build_late" if self.late else "soak_workers:build"

    @property
    def is_late(self) -> bool:
        return self.late or self.without_validation


@dataclass
class Found:
    """What a run has found."""

    counts: Counter[Outcome]
    faults: Counter[str]
    trouble: str = ""
    """Blocks or processes that are left, or a cluster that did not come back."""

    @property
    def completed_share(self) -> float:
        num_stayed = self.counts.total() - self.counts[Outcome.LEFT]
        return self.counts[Outcome.RIGHT] / num_stayed if num_stayed else 0.0

    @property
    def passed(self) -> bool:
        is_right = not self.counts[Outcome.WRONG] and not self.counts[Outcome.HUNG] and not self.trouble
        return is_right and self.completed_share >= MIN_COMPLETED

    def summary(self, options: Options) -> str:
        outcomes = ", ".join(f"{self.counts[outcome]} {outcome.value}" for outcome in Outcome)
        faults = ", ".join(f"{number} {kind}" for kind, number in sorted(self.faults.items()))
        return (
            f"soak: {'passed' if self.passed else 'FAILED'}: {self.counts.total()} requests: {outcomes}"
            f" ({100 * self.completed_share:.2f} % of those who stayed completed);"
            f" {self.faults.total()} faults: {faults or 'none'};"
            f" left over: {self.trouble or 'nothing'}; seed {options.seed}"
        )


def main() -> int:
    options = _parse()
    # A folder of its own that stays when something was wrong: with the workers' logs.
    folder = Path(tempfile.mkdtemp(prefix="splitserve-soak-", dir=options.folder))
    python_path = [*sys.path[:3], str(FOLDER.parent.parent)]
    override({"PYTHONPATH": os.pathsep.join(python_path)})  # workers are built by a module of this folder
    found = asyncio.run(_soak(options, folder))
    if found.passed:
        _remove(folder)
    else:
        _say(f"logs: {folder}")
    _say(found.summary(options))
    return 0 if found.passed else 1


def _parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fault-every", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1, help="of the requests, their order and the faults")
    parser.add_argument("--checksums", action="store_true", help="compare blocks; reads get bit flips, too")
    parser.add_argument("--late", action="store_true", help="let leases lapse under late readers")
    parser.add_argument(
        "--without-validation", action="store_true", help="as --late, and take any verdict for VALID"
    )
    parser.add_argument("--folder", type=Path, help="for what stays when something was wrong; else /tmp")
    arguments = parser.parse_args()
    return Options(
        seconds=arguments.seconds,
        fault_every_s=arguments.fault_every,
        seed=arguments.seed,
        checksum=arguments.checksums,
        late=arguments.late,
        without_validation=arguments.without_validation,
        folder=arguments.folder,
    )


def _config(options: Options, folder: Path) -> ClusterConfig:
    model = tiny_model("llama", folder, max_position_embeddings=1024)
    return tiny_config(
        model,
        max_model_len=MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS,
        prefill__num_workers=2,
        decode__num_workers=2,
        decode__num_blocks=400,
        **{"prefill.num_blocks": LATE_PREFILL_BLOCKS} if options.is_late else {},
        kv_transfer__lease_s=LATE_LEASE_S if options.is_late else LEASE_S,
        kv_transfer__checksum=options.checksum,
    )


async def _soak(options: Options, folder: Path) -> Found:
    config, cases = _config(options, folder), make_cases(NUM_CASES, options.seed)
    started_s = time.monotonic()
    golden = await golden_answers(config, cases)
    _say(f"{len(golden)} golden answers in {time.monotonic() - started_s:.1f} s")
    import router.app  # noqa: F401 - takes seconds, in which no router may sit still

    streams = RouterStreams()
    cluster = ProcessCluster(
        config, build=options.build, health_timeout_s=None, log_dir=folder, dial=streams
    )
    found = Found(Counter(), Counter())
    try:
        async with cluster, cluster.http() as url, _http_client(url) as http:
            clients = Clients(http, cases, golden, seed=options.seed, report=_tell)
            await _put_under_fire(options, cluster, streams, clients, found)
            await http.aclose()
            await cluster.wait_until_ready(IDLE_S)
            await cluster.wait_until_idle(IDLE_S)
    except (SplitserveError, AssertionError) as error:
        found.trouble = f"{type(error).__name__}: {error}"
    return found


def _http_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)  # noqa: S113 - requests are bounded


async def _put_under_fire(
    options: Options, cluster: ProcessCluster, streams: RouterStreams, clients: Clients, found: Found
) -> None:
    concurrency = await _warm_up(clients)
    _say(f"ready: {concurrency} requests at a time, for {options.seconds:g} s")
    injector = FaultInjector(
        cluster, streams, clients.hang_up, every_s=options.fault_every_s, seed=options.seed, log=_say
    )
    faults = asyncio.create_task(injector.run())
    try:
        await clients.run(concurrency, options.seconds, partial(_is_lost, clients))
    finally:
        faults.cancel()
        await asyncio.wait([faults])
        found.counts, found.faults = clients.counts(), injector.counts()


async def _warm_up(clients: Clients) -> int:
    """The fewest requests at a time that give about `LOAD` of the best rate."""
    rates = {n: await clients.run(n, TRY_S, partial(_is_lost, clients)) for n in TRIED_CONCURRENCIES}
    _say("warm-up: " + ", ".join(f"{rate:.1f}/s with {n}" for n, rate in rates.items()))
    return next(n for n, rate in rates.items() if rate >= LOAD * max(rates.values()))


def _is_lost(clients: Clients) -> bool:
    """One wrong answer says it all."""
    return clients.counts()[Outcome.WRONG] > 0


def _tell(judged: Judged) -> None:
    """Everything that it takes to look into what went wrong."""
    if judged.outcome in (Outcome.RIGHT, Outcome.LEFT):
        return
    body = json.dumps({**judged.case.body, "prompt": f"{len(judged.case.body['prompt'])} tokens"})
    _say(
        f"{judged.outcome.value.upper()}: case {judged.case.number} at {judged.started_s:.3f} after"
        f" {judged.taken_s:.2f} s: {judged.detail}\n    {body}"
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
