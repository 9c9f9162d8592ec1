"""Workers of several ranks whose pools hold parts of one model's KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transport_kit import Wire

from kv_transfer import LayoutReader, PoolMemory
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import KvTransport
from protocol.rank_layout import KvPart, RankLayout, kv_parts

NUM_LAYERS, HEAD_DIM, NUM_BLOCKS = 4, 4, 12
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNTOUCHED = -7.0


def fingerprint_of(
    layout: RankLayout, num_kv_heads: int, block_size: int = 4, dtype: str = "float32"
) -> Fingerprint:
    return Fingerprint(
        "m",
        "r",
        dtype,
        dtype,
        NUM_LAYERS,
        num_kv_heads,
        HEAD_DIM,
        block_size,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
    )


class RankPools:
    """The pools of all ranks of one worker, and the whole model's KV that they hold together."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self.parts = kv_parts(NUM_LAYERS, fingerprint.num_kv_heads, fingerprint.rank_layout)
        self.memories: list[PoolMemory] = []
        self.tensors: list[torch.Tensor] = []
        """Of each rank `[blocks, layers, 2, heads, block_size, head_dim]`, over the rank's pool."""
        for part in self.parts:
            dtype, size = TORCH[fingerprint.kv_dtype], fingerprint.block_size
            shape = NUM_BLOCKS, len(part.layers), 2, len(part.heads), size, HEAD_DIM
            tensor = torch.full(shape, UNTOUCHED, dtype=dtype)
            block_bytes = tensor[0].numel() * tensor.element_size()
            self.memories.append(PoolMemory(tensor.data_ptr(), NUM_BLOCKS, block_bytes, owner=tensor))
            self.tensors.append(tensor)

    def fill(self, whole: torch.Tensor) -> None:
        """`whole` is the model's KV `[blocks, layers, 2, heads, block_size, head_dim]`."""
        for part, tensor in zip(self.parts, self.tensors, strict=True):
            tensor.copy_(part_of(whole, part))

    def tokens(self, rank: int, table: Sequence[BlockId]) -> torch.Tensor:
        """A sequence's KV on this rank, `[layers, 2, heads, tokens, head_dim]`."""
        return joined(self.tensors[rank], table)


def part_of(whole: torch.Tensor, part: KvPart) -> torch.Tensor:
    layers, heads = part.layers, part.heads
    return whole[:, layers.start : layers.stop, :, heads.start : heads.stop]


def joined(blocks: torch.Tensor, table: Sequence[BlockId]) -> torch.Tensor:
    return torch.cat([blocks[block] for block in table], dim=3)


def random_kv(fingerprint: Fingerprint, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS, NUM_LAYERS, 2, fingerprint.num_kv_heads, fingerprint.block_size, HEAD_DIM
    return torch.randn(shape, generator=generator).to(TORCH[fingerprint.kv_dtype])


class Owner:
    """A worker whose ranks can be read from."""

    def __init__(self, wire: Wire, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self.whole = random_kv(fingerprint)
        self.pools = RankPools(fingerprint)
        self.pools.fill(self.whole)
        self.transports = [wire.attach(memory) for memory in self.pools.memories]

    @property
    def endpoint(self) -> TransportEndpoint:
        first, *others = (transport.endpoint for transport in self.transports)
        return replace(first, others=tuple(others))

    def part(self, part: KvPart, table: Sequence[BlockId]) -> torch.Tensor:
        """What a rank with this part should get, as `RankPools.tokens`."""
        return joined(part_of(self.whole, part), table)


class Reader:
    """A worker whose ranks read."""

    def __init__(self, wire: Wire, fingerprint: Fingerprint, staging_bytes: int = 4096) -> None:
        self.pools = RankPools(fingerprint)
        self.transports: list[KvTransport] = []

        def attach(memory: PoolMemory, serial: int) -> KvTransport:
            self.transports.append(wire.attach(memory))
            return self.transports[-1]

        self.ranks = [
            LayoutReader(memory, fingerprint, attach, rank=rank, staging_bytes=staging_bytes)
            for rank, memory in enumerate(self.pools.memories)
        ]

    def connect(self, owner: Owner) -> None:
        for rank in self.ranks:
            rank.connect(owner.endpoint, owner.fingerprint)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
