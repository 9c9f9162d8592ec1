"""How do the ranks of one worker find each other? Through a small store that the leader holds.

leader    host_store(host)      -> address, which goes to the followers with their start
follower  join_store(address)   -> the same store
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from protocol.errors import EngineFault, StartupError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def host_store(host: str, *, limit_s: float = 60.0) -> tuple[Store, str]:
    """A store that listens on this address alone, at a port that is free; and "host:port".

    Its requests are bounded by `limit_s`. Raises `StartupError`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        listener = socket.create_server((host, 0), family=_family(host))
    except OSError as error:
        raise StartupError(f"the ranks cannot meet at {host}: {error}") from error
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
        master_listen_fd=listener.detach(),  # the store owns it from here on
    )
    return store, f"{host}:{port}"


def join_store(address: str, *, limit_s: float = 60.0) -> Store:
    """The leader's store. Raises `EngineFault` when it does not answer within `limit_s`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    try:
        store: Store = TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
        )
    except RuntimeError as error:
        raise EngineFault(f"the leader at {address} does not answer ({error})") from error
    return store


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
