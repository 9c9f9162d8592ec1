"""A router put together: everything between the HTTP routes and the workers, with its life cycle."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from protocol.errors import EngineFault, SplitserveError
from protocol.ids import RequestId, Role
from protocol.membership import WorkerRecord
from protocol.ports import Clock, Directory
from protocol.wire import splitserve_pb2 as pb
from router.admission import Admission
from router.canary import Canary
from router.connection import Connect, grpc_connect
from router.exposition import merge
from router.metrics import LegMetrics, RouterMetrics
from router.openai.prepare import Preparer
from router.openai.reset import ResetRequest
from router.orchestrator import Orchestrator
from router.policy import LeastOutstandingWork, RoutingPolicy
from router.ports import num_usable
from router.service import Service
from router.settings import RouterSettings
from router.tokenizer import Tokenizer
from router.workers import WorkerSet
from rpc import Dial, open_channel


class Router:
    """Composition of one router replica. Made, started and used on one event loop."""

    def __init__(
        self,
        *,
        settings: RouterSettings,
        directory: Directory,
        tokenizer: Tokenizer,
        served_model_name: str,
        max_model_len: int,
        cluster_token: str,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        policy: RoutingPolicy | None = None,
        dial: Dial = open_channel,
        connect: Connect | None = None,
    ) -> None:
        """`dial` opens the channels to workers; `connect` replaces gRPC, for tests. Does no I/O."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.served_model_name = served_model_name
        self.max_model_len = max_model_len
        self.metrics = RouterMetrics()
        self.started_at = int(wall_clock())
        self.wall_clock = wall_clock
        self.workers = WorkerSet(
            directory,
            connect or grpc_connect(cluster_token, clock, settings.frame_timeout_s, dial),
            settings,
            clock,
        )
        self.orchestrator = Orchestrator(
            self.workers, policy or LeastOutstandingWork(), settings, clock, LegMetrics(self.metrics)
        )
        self.admission = Admission(settings.max_in_flight, settings.max_queued, settings.retry_after_s)
        self.service = Service(self.orchestrator, self.admission, tokenizer, self.metrics, clock)
        self.preparer = Preparer(tokenizer, served_model_name, max_model_len, settings.max_num_choices)
        self.canary = Canary(self.orchestrator, self.workers, settings, clock)
        self._singing: asyncio.Task[None] | None = None
        self._expose_gauges()

    def _expose_gauges(self) -> None:
        self.metrics.running.set_function(lambda: self.admission.num_in_flight)
        self.metrics.waiting.set_function(lambda: self.admission.num_queued)
        self.metrics.waiting_for_credit.set_function(lambda: self.workers.credits.num_waiting)
        for role in Role:
            gauge = self.metrics.workers.labels(role.value)
            gauge.set_function(partial(num_usable, self.workers, role))

    async def start(self) -> None:
        """Begin to follow the directory and to watch the service. Waits for no worker. Idempotent."""
        await self.workers.start()
        if self._singing is None:
            self._singing = asyncio.create_task(self.canary.run(), name="canary")

    async def stop(self) -> None:
        """Drop all workers; requests that still run fail with 503. Bounded, idempotent."""
        if self._singing is not None:
            self._singing.cancel()
            await asyncio.wait([self._singing], timeout=self.settings.stop_timeout_s)
            self._singing = None
        await self.workers.stop()

    def new_request_id(self) -> RequestId:
        """Unique in the cluster, whatever id the client chose for its own logs."""
        return RequestId(uuid.uuid4().hex)

    def check_health(self) -> None:
        """Raise `EngineFault` when a part that should run for ever does not."""
        self.workers.check()
        if self._singing is None or self._singing.done():
            raise EngineFault("the router does not watch the service any more")

    def unhealthy_because(self) -> str | None:
        """Why no request can succeed now, or None.

        Without prefill workers requests succeed, if more slowly, as long as decode workers may compute
        prompts: who restarts what is unhealthy, or takes its clients away, should not do so then.
        """
        try:
            self.workers.check()
        except EngineFault as error:
            return error.message
        needed = [Role.DECODE] if self.settings.local_prefill_on_failure else list(Role)
        return self._missing(needed)

    def impaired_because(self) -> str | None:
        """Why the service does not work as it is meant to, though requests succeed; or None."""
        return self._missing(list(Role))

    def not_ready_because(self) -> str | None:
        """Why the service has not proved lately that it works, or None.

        It works when a hand-off does. A router that only falls back to local prefill is alive, not ready:
        new clients are better off with another one, and a roll-out that leads there should stop.
        """
        return self.unhealthy_because() or self.canary.obstacle()

    def _missing(self, roles: Sequence[Role]) -> str | None:
        missing = [role.value for role in roles if not num_usable(self.workers, role)]
        return f"no usable {' and no usable '.join(missing)} worker" if missing else None

    async def reset_prefix_cache(
        self, fields: ResetRequest
    ) -> list[tuple[WorkerRecord, SplitserveError | None]]:
        """Let all workers forget cached KV; who was reached, and why the others were not.

        Raises `InvalidRequest`.
        """
        if fields.prompt is None:
            return await self.workers.invalidate_cache(pb.InvalidateCacheRequest(everything=True))
        prompt = await self.preparer.prompt(fields.prompt, fields.add_special_tokens is not False)
        return await self.workers.invalidate_cache(
            pb.InvalidateCacheRequest(token_ids=prompt, cache_salt=fields.cache_salt or "")
        )

    async def metrics_page(self) -> bytes:
        """The router's and every answering worker's metrics in Prometheus' text format."""
        return merge(self.metrics.registry, await self.workers.scrape())

    def assert_idle(self) -> None:
        """No request is anywhere."""
        self.admission.assert_idle()
        self.orchestrator.assert_idle()
        self.workers.assert_idle()
