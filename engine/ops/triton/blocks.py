"""The heads that one rank wants of some KV blocks, as one piece of memory, and back again."""

from __future__ import annotations

import torch

from engine.ops.triton.launch import gather_words, scatter_words

_ALIGNMENT = 16
_WORD = torch.int32


def gather_parts(
    kv_blocks: torch.Tensor, block_ids: torch.Tensor, first_head: int, num_heads: int
) -> torch.Tensor:
    """Copy heads of `kv_blocks` [blocks, layers, 2, kv_heads, block_size, head_dim] out of some blocks.

    Returns [block ids, layers, 2, num_heads, block_size, head_dim], contiguous: any of its bytes can be
    sent. `block_ids` is int32 on the same device.
    """
    _, num_layers, _, _, block_size, head_dim = kv_blocks.shape
    shape = (len(block_ids), num_layers, 2, num_heads, block_size, head_dim)
    parts = torch.empty(shape, dtype=kv_blocks.dtype, device=kv_blocks.device)
    gather_words(
        _planes(parts), _planes(kv_blocks), block_ids, *_word_range(kv_blocks, first_head, num_heads)
    )
    return parts


def scatter_parts(
    parts: torch.Tensor, kv_blocks: torch.Tensor, block_ids: torch.Tensor, first_head: int
) -> None:
    """Put what `gather_parts` returned into heads `first_head` on of some blocks, all different."""
    word_range = _word_range(kv_blocks, first_head, parts.shape[3])
    scatter_words(_planes(parts), _planes(kv_blocks), block_ids, *word_range)


def _planes(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, keys or values of a layer, words]."""
    return blocks.view(blocks.shape[0], 2 * blocks.shape[1], -1).view(_WORD)


def _word_range(kv_blocks: torch.Tensor, first_head: int, num_heads: int) -> tuple[int, int]:
    """(first word, words) of some heads in a plane."""
    if not 0 <= first_head < first_head + num_heads <= kv_blocks.shape[3]:
        raise ValueError(f"no {num_heads} heads from {first_head} on among {kv_blocks.shape[3]}")
    head_bytes = kv_blocks[0, 0, 0, 0].nbytes
    if head_bytes % _ALIGNMENT:
        raise ValueError(f"a head of a block must be a multiple of {_ALIGNMENT} bytes, not {head_bytes}")
    return first_head * head_bytes // _WORD.itemsize, num_heads * head_bytes // _WORD.itemsize
