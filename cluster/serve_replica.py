"""What runs inside a Serve replica before its role object is made.

The replica's class (`<role>/deployment.py`) knows Serve and nothing of the configuration; `compose`
knows the configuration and nothing of Ray. These functions stand between them. They are bound into the
application with the configuration and the cluster token, and run in the replica's process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from cluster.logs import log_to_serve

if TYPE_CHECKING:
    from decode_worker import DecodeWorker
    from prefill_worker import PrefillWorker
    from router.router import Router


def build_prefill_worker(config: ClusterConfig, token: str, replica_name: str) -> PrefillWorker:
    from cluster import compose
    from cluster.ray_directory import RayDirectory
    from cluster.worker_replica import own_address

    log_to_serve()
    keep_serve_on_loopback(config)
    with collecting_no_garbage():
        return compose.build_prefill_worker(
            config,
            token=token,
            directory=RayDirectory(),
            replica_name=replica_name,
            host=own_address(config.prefill.host),
        )


def build_decode_worker(config: ClusterConfig, token: str, replica_name: str) -> DecodeWorker:
    from cluster import compose
    from cluster.ray_directory import RayDirectory
    from cluster.worker_replica import own_address

    log_to_serve()
    keep_serve_on_loopback(config)
    with collecting_no_garbage():
        return compose.build_decode_worker(
            config,
            token=token,
            directory=RayDirectory(),
            replica_name=replica_name,
            host=own_address(config.decode.host),
        )


def build_router(config: ClusterConfig, token: str) -> Router:
    from cluster import compose
    from cluster.ray_directory import RayDirectory

    log_to_serve()
    keep_serve_on_loopback(config)
    with collecting_no_garbage():
        return compose.build_router(config, token=token, directory=RayDirectory())


def application_is_deleted() -> bool:
    """Whether the application of this replica is to end, and not this replica alone. Blocks."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        application = serve.status().applications.get(serve.get_replica_context().app_name)
    except (RayError, RayServeException):
        return False  # the controller is being replaced: nobody deletes anything now
    return application is None or application.status.value == "DELETING"


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Imports and loading make a hundred thousand objects that live as long as the process.

    Looking for garbage among them costs a tenth of the start, and milliseconds of every later full
    collection, in the middle of a step. So it is not done, and what is there at the end is left out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_serve_on_loopback(config: ClusterConfig) -> None:
    """Make Serve's own gRPC server in this replica listen on 127.0.0.1 when the cluster is local.

    Ray 2.60 binds that server to `[::]` without a setting for it, whatever the node's address is. It
    binds it after the replica's constructor, hence this place. Nobody uses the server here, since no
    call passes through a Serve handle. A test looks at all listening sockets of a running cluster.
    """
    if config.ray.address is not None:
        return
    from ray.serve._private import replica

    bind: Callable[[object, str], int] = vars(replica)["add_port_to_grpc_server"]

    def bind_to_loopback(server: object, address: str) -> int:
        return bind(server, address.replace("[::]:", "127.0.0.1:"))

    vars(replica)["add_port_to_grpc_server"] = bind_to_loopback
