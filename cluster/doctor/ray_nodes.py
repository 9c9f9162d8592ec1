"""The nodes of a Ray cluster: an actor on each, which does there what `ThisNode` does here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.doctor.facts import NodeFacts
from cluster.doctor.node import Node, ThisNode
from cluster.doctor.read_plan import ReadPlan
from cluster.doctor.read_process import READ_LIMIT_S, START_LIMIT_S, Measured
from protocol.errors import SplitserveError, WorkerUnavailable

EXAMINE_LIMIT_S = 55.0
"""The start of a Python on a busy node included."""
GRACE_S = 10.0


class RayNode:
    """One node. Its actor takes nothing of what Ray counts, and dies with this process."""

    def __init__(self, name: str, info: dict[str, Any], config: ClusterConfig) -> None:
        self.name = name
        self._resources = {
            key: float(amount) for key, amount in info["Resources"].items() if not key.startswith("node:")
        }
        pinned = NodeAffinitySchedulingStrategy(info["NodeID"], soft=False)
        make = ray.remote(ThisNode).options(num_cpus=0, max_restarts=0, scheduling_strategy=pinned)
        self._actor: Any = make.remote(name, config)

    def examine(self) -> NodeFacts:
        facts: NodeFacts = self._ask("examine", EXAMINE_LIMIT_S)
        return replace(facts, resources=self._resources)

    def own_blocks(self, plan: ReadPlan) -> str:
        return str(self._ask("own_blocks", START_LIMIT_S + GRACE_S, plan))

    def read_blocks(self, endpoint: str, plan: ReadPlan) -> Measured:
        measured: Measured = self._ask("read_blocks", READ_LIMIT_S + GRACE_S, endpoint, plan)
        return measured

    def stop(self) -> None:
        """Its processes see their input end, and go."""
        ray.kill(self._actor)

    def _ask(self, method: str, limit_s: float, *arguments: object) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit_s)
        except RayTaskError as error:
            if isinstance(error.cause, SplitserveError):
                raise error.cause from error
            raise WorkerUnavailable(f"{method} failed on {self.name}: {error.cause}") from error
        except GetTimeoutError as error:
            raise WorkerUnavailable(f"no answer within {limit_s:.0f} s") from error
        except RayError as error:
            said = str(error).strip().splitlines()
            raise WorkerUnavailable(
                f"no actor runs there: {said[0] if said else type(error).__name__}"
            ) from error


def alive_nodes(config: ClusterConfig) -> list[Node]:
    """While connected to Ray."""
    alive = [info for info in _all_nodes() if info["Alive"]]
    names = Counter(info["NodeManagerHostname"] for info in alive)
    return [RayNode(_name(info, names), info, config) for info in alive]


def lost_nodes() -> list[str]:
    """By address: one that came back has another entry."""
    nodes = _all_nodes()
    alive = {info["NodeManagerAddress"] for info in nodes if info["Alive"]}
    return sorted({info["NodeManagerAddress"] for info in nodes if not info["Alive"]} - alive)


def _all_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _name(info: dict[str, Any], names: Counter[str]) -> str:
    host, address = info["NodeManagerHostname"], info["NodeManagerAddress"]
    return str(host) if names[host] == 1 else f"{host} ({address})"
