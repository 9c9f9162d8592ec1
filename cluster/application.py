"""The Ray Serve application: router, prefill pool and decode pool as its three deployments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview

from cluster.autoscaling import autoscaling_of
from cluster.config import ClusterConfig, PoolConfig, load_config
from cluster.deployment_version import version_of
from cluster.environment import read_environment
from cluster.faults import check_faults
from cluster.own_version import keep_version
from cluster.ranks.actors import bundles_of
from cluster.rendering import APPLICATION
from cluster.serve_failures import explain_failure
from cluster.serve_replica import (
    application_is_deleted,
    build_decode_worker,
    build_prefill_worker,
    build_router,
)
from cluster.worker_replica import WorkerReplica
from protocol.errors import StartupError
from protocol.ids import Role
from router.deployment import RouterReplica
from router.http_limits import ClientLimits
from router.listener import Listen

ROUTER = "router"
STOP_S = 5.0
"""How long a replica may take to end once nothing runs on it."""
ROUTER_STOP_S = 10.0
"""The same of a router, whose clients may still have to be told of their requests' end."""

_WATCH = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": STOP_S,
}
"""A replica whose process died is replaced within a second or two."""


@dataclass(frozen=True, slots=True)
class Builders:
    """What runs inside the replicas to make the role objects."""

    router: Callable[..., Any] = build_router
    prefill: Callable[..., Any] = build_prefill_worker
    decode: Callable[..., Any] = build_decode_worker


def build_application(
    config: ClusterConfig, token: str, builders: Builders | None = None
) -> serve.Application:
    """The application as `serve.run` takes it. Starts nothing."""
    builders = builders or Builders()
    prefill = _deployment(WorkerReplica, _pool_options(Role.PREFILL, config), config, token)
    decode = _deployment(WorkerReplica, _pool_options(Role.DECODE, config), config, token)
    router_class, listen = _router_class(config)
    router = _deployment(router_class, _router_options(config), config, token)
    limit_s = config.drain_limit_s
    return router.bind(
        partial(builders.router, config, token),
        listen,
        ClientLimits(config.http.head_timeout_s, config.http.read_timeout_s),
        limit_s,
        application_is_deleted,
        prefill.bind(partial(builders.prefill, config, token), config.prefill.host, limit_s),
        decode.bind(partial(builders.decode, config, token), config.decode.host, limit_s),
    )


def _deployment(
    replica: type, options: dict[str, Any], config: ClusterConfig, token: str
) -> serve.Deployment:
    """With the version by which Serve knows whether a new deployment replaces running replicas.

    Without one Serve replaces all of them each time, routers included, whatever has changed.
    """
    deployment: serve.Deployment = serve.deployment(**options)(replica)
    keep_version(deployment, version_of(options["name"], config, token))
    return deployment


def from_arguments(arguments: Mapping[str, object]) -> serve.Application:
    """The application as `import_path: cluster.application:from_arguments` of a Serve config file.

    `arguments` is the content of Splitserve's configuration file. The cluster token must be in the
    environment of the nodes, since nothing here could hand the same one to all of them.
    """
    token = read_environment().cluster_token
    if token is None:
        raise StartupError("set SPLITSERVE_CLUSTER_TOKEN to the same secret on every node")
    config = load_config(None, dict(arguments), "in the arguments")
    check_faults(config)
    return build_application(config, token)


def start_serve(config: ClusterConfig) -> None:
    """Start Serve's controller, and its HTTP proxies where requests go through them."""
    through_proxies = config.http.through == "proxy"
    serve.start(
        proxy_location=ProxyLocation.EveryNode if through_proxies else ProxyLocation.Disabled,
        http_options={"host": config.http.host, "port": config.http.port} if through_proxies else None,
    )


def deploy(application: serve.Application) -> None:
    """Hand the application to Serve and return at once; `deployments` tells what becomes of it."""
    target = serve.RunTarget(target=application, name=APPLICATION, route_prefix="/")
    serve.run_many(
        [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def delete(*, with_serve: bool) -> None:
    """Take the application down: replicas say farewell first. `with_serve` ends an empty Serve, too."""
    from cluster.ray_directory import remove_directory

    serve.delete(APPLICATION)
    remove_directory()
    if with_serve:
        end_empty_serve()


def begin_to_delete() -> None:
    """Take the application down and return at once; `deployments` tells what is still there."""
    serve.delete(APPLICATION, _blocking=False)


def end_empty_serve() -> None:
    """End Serve's own processes unless other applications run there."""
    if not serve.status().applications:
        serve.shutdown()  # type: ignore[no-untyped-call]


Deployments = Mapping[str, DeploymentStatusOverview]


def deployments() -> Deployments:
    """What Serve says about our deployments, by name; empty before they are known."""
    application = serve.status().applications.get(APPLICATION)
    return dict(application.deployments) if application else {}


def is_settled() -> bool:
    """Whether everything that Serve was told last is done: what was replaced is gone, the new runs."""
    application = serve.status().applications.get(APPLICATION)
    return application is not None and application.status is ApplicationStatus.RUNNING


def running(seen: Deployments) -> set[str]:
    """Names of the deployments all of whose replicas run."""
    return {name for name, deployment in seen.items() if deployment.status.value == "HEALTHY"}


def explain_failures(seen: Deployments) -> str | None:
    """Why the application cannot start, in one sentence; None while there is hope.

    The first failure counts: a constructor that failed once with a `StartupError` fails again.
    """
    for name, deployment in seen.items():
        problem = explain_failure(deployment.message)
        failed_for_good = deployment.status.value == "DEPLOY_FAILED"
        if problem and (failed_for_good or StartupError.__name__ in deployment.message):
            return f"{name} cannot start: {problem}"
    return None


def _router_class(config: ClusterConfig) -> tuple[type, Listen | None]:
    if config.http.through == "proxy":
        return serve.ingress()(RouterReplica), None
    return RouterReplica, Listen(config.http.host, config.http.port)


def _router_options(config: ClusterConfig) -> dict[str, Any]:
    return _WATCH | {
        "name": ROUTER,
        "num_replicas": 1,
        # The router's own admission says 429; Serve's limit must never be the one that is hit.
        "max_ongoing_requests": 4 * config.router.max_num_inflight,
        "graceful_shutdown_timeout_s": config.drain_limit_s + ROUTER_STOP_S,
        # It costs little, and without it nobody would accept between the old one and the new one.
        "max_surge_percent": 100,
        "ray_actor_options": {"num_cpus": 0, "resources": dict(config.router.resources)},
    }


def _pool_options(role: Role, config: ClusterConfig) -> dict[str, Any]:
    pool = config.pool(role)
    autoscaling = autoscaling_of(role.value, pool)
    number = {"autoscaling_config": autoscaling} if autoscaling else {"num_replicas": pool.num_workers}
    return _WATCH | {
        "name": role.value,
        **number,
        "max_ongoing_requests": 1,  # no request passes through Serve
        "graceful_shutdown_timeout_s": config.drain_limit_s + STOP_S,
        "max_surge_percent": pool.max_surge_percent,
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "resources": dict(pool.resources),
        },
        **_placement_of_ranks(pool, config.layout_of(pool).num_ranks),
    }


def _placement_of_ranks(pool: PoolConfig, num_ranks: int) -> dict[str, Any]:
    """The replica itself is the first rank; it starts the others in the group that Serve makes for it."""
    if num_ranks == 1:
        return {}
    return {
        "placement_group_bundles": bundles_of(pool, num_ranks),
        "placement_group_strategy": pool.placement_strategy,
    }
