"""How are calls made to fail on purpose? By a wrapper around the channel, on the side of the caller.

No interceptor: gRPC then feeds a stream's writes through a task of its own (see `rpc.client`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

import grpc

from protocol.faults import Fault
from rpc.client import open_channel
from rpc.faults import CallFaultKind, CallFaults, CallPlan

Dial = Callable[[str, str], grpc.aio.Channel]
"""Opens a channel to an address (host:port) with a cluster token, as `open_channel` does."""


class FaultyDial:
    """The `Dial` whose channels have faults. Give it to whatever opens channels in a process."""

    def __init__(self, faults: CallFaults, caller: str, dial: Dial = open_channel) -> None:
        """`caller` names the process within the cluster."""
        self.plans = faults.plans(caller)
        """Of calls and of what is sent on streams, by method, for tests that script what happens next."""
        self.received = faults.plans(f"{caller}/received")
        """Of what comes back on streams."""
        self._dial = dial

    def __call__(self, address: str, token: str) -> FaultyChannel:
        return FaultyChannel(self._dial(address, token), self.plans, self.received)


class FaultyChannel(grpc.aio.Channel):
    """Another channel, which it owns, with faults. Its streams know what `WorkerSession` asks of one."""

    def __init__(
        self, channel: grpc.aio.Channel, plans: Mapping[str, CallPlan], received: Mapping[str, CallPlan]
    ) -> None:
        """The plans as `FaultyDial` has them."""
        self._channel = channel
        self._plans = plans
        self._received = received

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        plan = self._plans[_name(method)]
        return FaultyMethod(self._channel.unary_unary(method, *args, **options), plan)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        open_stream = self._channel.stream_stream(method, *args, **options)
        plans = self._plans[_name(method)], self._received[_name(method)]
        return lambda *args, **options: FaultyStream(open_stream(*args, **options), *plans)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._channel.unary_stream(*args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._channel.stream_unary(*args, **options)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> FaultyChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class FaultyMethod:
    """One unary method of a channel."""

    def __init__(self, method: Callable[..., Any], plan: CallPlan) -> None:
        self._method = method
        self._plan = plan

    def __call__(self, request: Any, *, timeout: float | None = None, **options: Any) -> Any:
        """What can be awaited once for the reply."""
        fault = self._plan.take()
        if fault is None:
            return self._method(request, timeout=timeout, **options)

        def send(timeout: float | None) -> Any:
            return self._method(request, timeout=timeout, **options)

        return _spoiled(fault, send, timeout)


async def _spoiled(
    fault: Fault[CallFaultKind], send: Callable[[float | None], Any], timeout_s: float | None
) -> Any:
    """The reply to a call with a fault; `send` makes the call with a time limit."""
    if fault.kind is CallFaultKind.DISCONNECT:
        raise _error(grpc.StatusCode.UNAVAILABLE)
    if fault.kind is CallFaultKind.DUPLICATE:
        return await _both(send(timeout_s), send(timeout_s))
    try:
        async with asyncio.timeout(timeout_s):
            if fault.kind is CallFaultKind.DELAY:
                await asyncio.sleep(fault.delay_s)
                return await send(timeout_s)
            if fault.kind is CallFaultKind.LOSE_REPLY:
                with suppress(grpc.aio.AioRpcError):  # an error is a reply, and is lost, too
                    await send(timeout_s)
            return await asyncio.get_running_loop().create_future()  # nobody ever answers
    except TimeoutError as error:
        raise _error(grpc.StatusCode.DEADLINE_EXCEEDED) from error


async def _both(first: Any, second: Any) -> Any:
    """The reply that comes to the second call, once both have one."""
    reply: Any = (await asyncio.gather(first, second, return_exceptions=True))[1]
    if isinstance(reply, BaseException):
        raise reply
    return reply


class FaultyStream:
    """One open stream; every message has a fate, in both directions."""

    def __init__(self, call: Any, sent: CallPlan, received: CallPlan) -> None:
        self._call = call
        self._sent = sent
        self._received = received
        self._is_silent = False
        self._is_given_up = asyncio.Event()

    async def write(self, message: Any) -> None:
        await self._meet_fate(self._sent)
        if not self._is_silent:
            await self._call.write(message)

    async def read(self) -> Any:
        """A silent stream is still read, so that its end is seen when the caller gives it up."""
        while True:
            message = await self._call.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                return message
            await self._meet_fate(self._received)
            if not self._is_silent and not self._is_given_up.is_set():
                return message

    def cancel(self) -> bool:
        self._is_given_up.set()
        return bool(self._call.cancel())

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    async def _meet_fate(self, plan: CallPlan) -> None:
        fault = plan.take()
        if fault is None:
            return
        if fault.kind is CallFaultKind.DISCONNECT:
            self._break()
        if fault.kind is CallFaultKind.DROP:
            self._is_silent = True
        if fault.kind is CallFaultKind.DELAY:
            with suppress(TimeoutError):
                async with asyncio.timeout(fault.delay_s):
                    await self._is_given_up.wait()

    def _break(self) -> NoReturn:
        self.cancel()
        raise _error(grpc.StatusCode.UNAVAILABLE)


def _name(method: str) -> str:
    """Of a method's full path."""
    return method.rpartition("/")[2]


def _error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """What gRPC raises when the connection, not the peer, is at fault."""
    details = f"fault injection: {code.name.lower()}"
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details)
