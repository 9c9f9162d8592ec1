"""Owners and readers of blocks of any layout, and what is right by torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transport_kit import Wire

from kv_transfer import LayoutReader, PoolMemory, block_checksums
from kv_transfer.layout import BlockLayout
from protocol.handoff import Fingerprint
from protocol.ids import BlockId
from protocol.rank_layout import KvPart

WHOLE = KvPart(range(3), range(2))
BASE = Fingerprint("m", "r", "float32", "float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8)
NUM_TOKENS = 100
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def fingerprint(block_size: int, dtype: str) -> Fingerprint:
    return replace(BASE, block_size=block_size, dtype=dtype, kv_dtype=dtype)


class Side:
    """A pool, seen as torch sees it, and the block table of one sequence in it."""

    def __init__(self, block_size: int, dtype: str, seed: int) -> None:
        self.fingerprint = fingerprint(block_size, dtype)
        self.layout = BlockLayout.of(self.fingerprint, WHOLE)
        generator = np.random.default_rng(seed)
        num_used = -(-NUM_TOKENS // block_size)
        num_blocks = num_used + 4
        self.memory = PoolMemory.allocate(num_blocks, self.layout.block_bytes)
        ids = generator.permutation(np.arange(1, num_blocks))[:num_used]
        self.table = [BlockId(int(block)) for block in ids]
        array: Any = self.memory.owner
        shape = num_blocks, self.layout.num_rows, block_size, self.layout.head_dim
        self.blocks = torch.from_numpy(array).view(-1).view(TORCH[dtype]).view(shape)
        self.blocks.copy_(torch.from_numpy(generator.standard_normal(shape)))

    def tokens(self) -> torch.Tensor:
        """`[rows, tokens, head_dim]`: the sequence's KV, in order."""
        return torch.cat([self.blocks[block] for block in self.table], dim=1)[:, :NUM_TOKENS]

    def poison(self) -> None:
        """Whatever is not read later is told by its value."""
        self.blocks.fill_(-7.0)

    def reader(self, wire: Wire, staging_bytes: int, *, with_checksums: bool = False) -> LayoutReader:
        return LayoutReader(
            self.memory,
            self.fingerprint,
            lambda memory, serial: wire.attach(memory),
            checksum=block_checksums if with_checksums else None,
            staging_bytes=staging_bytes,
        )
