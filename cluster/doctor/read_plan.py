"""Who reads what from whom, to see how fast KV moves? About 64 MiB, in blocks as configured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from cluster.doctor.facts import NODE, Seen
from cluster.doctor.placement import eligible_nodes
from cluster.preflight import least_block_bytes
from engine.model.config import ModelConfig
from protocol.errors import StartupError
from protocol.ids import Role

READ_BYTES = 64 * 2**20
DEFAULT_BLOCK_BYTES = 2**20
"""While the model is not known."""
MAX_REPEATS = 5
MAX_PAIRS = 12
"""With more pairs of nodes than this each reader reads from one owner only."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Sizes of one read, which both sides must agree on."""

    num_blocks: int
    block_bytes: int
    max_repeats: int = MAX_REPEATS

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ReadPlan:
        return cls(**json.loads(text))


def plan_reads(seen: Seen) -> ReadPlan:
    """The prefill pool's blocks: it owns what is read."""
    known = next((node.model.config for node in seen.nodes if node.model and node.model.config), None)
    size = _block_bytes(seen, dict(known)) if known else DEFAULT_BLOCK_BYTES
    return ReadPlan(max(1, READ_BYTES // size), size)


def _block_bytes(seen: Seen, fields: dict[str, Any]) -> int:
    try:
        return least_block_bytes(seen.config, seen.config.prefill, ModelConfig.from_hf(fields))
    except StartupError:  # the model's own check says it
        return DEFAULT_BLOCK_BYTES


def pairs_of(seen: Seen) -> list[tuple[str, str]]:
    """Who reads from whom: nodes that may get prefill workers, and those that may get decode workers.

    A node reads from itself when there is no other one. Nobody reads where KV does not move over NIXL,
    whose reads these are.
    """
    if seen.config.kv_transfer.transport != "nixl":
        return []
    owners, readers = (
        [node.name for node in eligible_nodes(seen, role) if NODE not in node.failures] for role in Role
    )
    pairs = [(owner, reader) for reader in readers for owner in owners if owner != reader]
    if len(pairs) > MAX_PAIRS:
        return [(owners[i % len(owners)], reader) for i, reader in enumerate(readers, 1)]
    return pairs or [(owner, owner) for owner in owners if owner in readers]
