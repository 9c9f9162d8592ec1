"""How does a process reach a worker's gRPC server?"""

from __future__ import annotations

from typing import Any

import grpc

from rpc.auth import StreamToken, UnaryToken
from rpc.options import KEEPALIVE_S, channel_options


def open_channel(address: str, token: str, *, keepalive_s: float = KEEPALIVE_S) -> grpc.aio.Channel:
    """A channel to `address` (host:port) that sends the cluster token with every call.

    Connects lazily and reconnects by itself. A peer that vanished without a word is found within
    twice `keepalive_s`: every call in flight then fails with UNAVAILABLE. Close it when done.
    """
    interceptors: Any = [UnaryToken(token), StreamToken(token)]  # an opaque type in the stubs
    return grpc.aio.insecure_channel(
        address, options=channel_options(keepalive_s), interceptors=interceptors
    )
