"""Parts of scattered blocks into one piece of memory and back, all layers in one launch.

Whole blocks are contiguous and are read in place; the heads that one tensor-parallel rank wants of them
are not. Numbers are moved as words of four bytes, whatever they mean.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_quad", "num_quads"])
def move_parts(
    blocks: tl.tensor,  # words of the cache
    staging: tl.tensor,  # [blocks moved, planes, num_words], contiguous
    block_ids: tl.tensor,  # [blocks moved] int32
    first_quad: tl.tensor,  # of a part in its plane, in units of four words
    num_quads: tl.tensor,  # of a part
    BLOCK_WORDS: tl.constexpr,
    PLANE_WORDS: tl.constexpr,
    WORDS: tl.constexpr,  # per program
    IS_GATHER: tl.constexpr,
) -> None:
    """Grid: (blocks moved, planes, parts of WORDS); a plane is the keys or the values of a layer."""
    number, plane = tl.program_id(0), tl.program_id(1)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    num_words = num_quads * 4  # so that the compiler sees that four words can be moved at a time
    mask = words < num_words
    block = tl.load(block_ids + number).to(tl.int64)
    in_cache = blocks + block * BLOCK_WORDS + plane * PLANE_WORDS + first_quad * 4 + words
    part = number.to(tl.int64) * tl.num_programs(1) + plane
    in_staging = staging + part * num_words + words
    if IS_GATHER:
        tl.store(in_staging, tl.load(in_cache, mask=mask), mask=mask)
    else:
        tl.store(in_cache, tl.load(in_staging, mask=mask), mask=mask)
