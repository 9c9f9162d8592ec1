"""Which KV blocks are moved? The demo model's in float32, and a Llama 8B's in bfloat16."""

from __future__ import annotations

from protocol.handoff import Fingerprint

BLOCK_SIZE = 16
"""Tokens."""
SHAPES = {
    "demo": Fingerprint("demo", "shape", "float32", "float32", 30, 3, 64, BLOCK_SIZE),
    "llama_8b": Fingerprint("llama_8b", "shape", "bfloat16", "bfloat16", 32, 8, 128, BLOCK_SIZE),
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def block_bytes(shape: Fingerprint) -> int:
    """Keys and values of a block's tokens, in all layers and heads."""
    num_items = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.block_size
    return num_items * ITEM_BYTES[shape.kv_dtype]
