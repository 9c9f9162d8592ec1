"""A whole cluster in one process, without Ray: for tests, `verify`, and a newcomer with a debugger.

The same role objects as under Ray, composed by the same functions, talking over the same wires (gRPC on
loopback, KV over the configured transport). Only the directory is an object instead of an actor.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from cluster import compose
from cluster.config import ClusterConfig
from cluster.directory import InProcessDirectory
from cluster.idleness import assert_worker_idle
from cluster.local_http import serve_http
from cluster.ranks import ThreadLauncher
from cluster.verification import Case
from kv_transfer import LoopbackNetwork
from protocol.errors import EngineFault, StartupError
from protocol.generation import GenerationRequest

if TYPE_CHECKING:
    from decode_worker import DecodeWorker
    from prefill_worker import PrefillWorker
    from router.router import Router

READY_TIMEOUT_S = 60.0
READY_POLL_S = 0.05


class LocalCluster:
    """Router, prefill workers and decode workers on the running event loop.

    Use as `async with LocalCluster(config) as cluster`. Construction loads the models.
    """

    def __init__(self, config: ClusterConfig) -> None:
        config = _with_patient_ranks(config)
        token = self.token = secrets.token_hex(16)
        """Opens the workers' gRPC servers."""
        self.directory = InProcessDirectory()
        network = LoopbackNetwork()
        launcher = ThreadLauncher(network)
        self.prefill_workers: list[PrefillWorker] = [
            compose.build_prefill_worker(
                config,
                token=token,
                directory=self.directory,
                replica_name=f"prefill-{i}",
                launcher=launcher,
                network=network,
            )
            for i in range(config.prefill.num_workers)
        ]
        self.decode_workers: list[DecodeWorker] = [
            compose.build_decode_worker(
                config,
                token=token,
                directory=self.directory,
                replica_name=f"decode-{i}",
                launcher=launcher,
                network=network,
            )
            for i in range(config.decode.num_workers)
        ]
        self.router: Router = compose.build_router(config, token=token, directory=self.directory)
        self._config = config

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; returns once a hand-off has succeeded. Raises `StartupError`."""
        try:
            for prefill in self.prefill_workers:
                await prefill.start(self._config.prefill.host, 0)
            for decode in self.decode_workers:
                await decode.start(self._config.decode.host, 0)
            await self.router.start()
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop everything, in the reverse order. Idempotent; each part bounds its own end.

        Each is stopped whatever becomes of the others; their errors are raised afterwards.
        """
        async with AsyncExitStack() as ends:
            ends.push_async_callback(_stop_all, self.prefill_workers)
            ends.push_async_callback(_stop_all, self.decode_workers)
            await self.router.stop()

    @asynccontextmanager
    async def http(self) -> AsyncIterator[str]:
        """Serve the OpenAI API as configured; gives the base URL. Raises `StartupError`."""
        async with serve_http(self._config, self.router) as url:
            yield url

    async def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """Output token ids of all cases, run at the same time through router, prefill and decode."""
        return list(await asyncio.gather(*(self._answer(case) for case in cases)))

    @property
    def _workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [*self.prefill_workers, *self.decode_workers]

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless no request is anywhere and every KV block is free."""
        self.router.assert_idle()
        for worker in self._workers:
            assert_worker_idle(worker)

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Give what was cancelled the time to end. Raises what `assert_idle` raises at the end of it."""
        for _ in range(int(timeout_s / READY_POLL_S)):
            try:
                self.assert_idle()
            except EngineFault:
                await asyncio.sleep(READY_POLL_S)
            else:
                return
        self.assert_idle()

    async def _answer(self, case: Case) -> list[int]:
        request = GenerationRequest(
            request_id=self.router.new_request_id(),
            prompt_token_ids=case.prompt_token_ids,
            sampling=case.sampling,
        )
        deltas = self.router.orchestrator.generate(request)
        return [token.token_id async for delta in deltas for token in delta.tokens]

    async def _wait_until_ready(self) -> None:
        reason: str | None = "nothing was tried"
        for _ in range(int(READY_TIMEOUT_S / READY_POLL_S)):
            reason = self.router.not_ready_because()
            if reason is None:
                return
            await asyncio.sleep(READY_POLL_S)
        raise StartupError(f"the cluster is not ready after {READY_TIMEOUT_S:.0f} s: {reason}")


def _with_patient_ranks(config: ClusterConfig) -> ClusterConfig:
    """The ranks of a worker that is loaded wait for their first step until all others are loaded, too."""
    ranks = config.ranks
    patient = ranks.model_copy(update={"step_timeout_s": max(ranks.step_timeout_s, ranks.start_timeout_s)})
    return config.model_copy(update={"ranks": patient})


async def _stop_all(workers: Sequence[PrefillWorker | DecodeWorker]) -> None:
    """At the same time; raises the first error when all have ended."""
    outcomes = await asyncio.gather(*(worker.stop() for worker in workers), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
