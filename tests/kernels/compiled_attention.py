"""What the compiler makes of the attention of one model for one GPU, and what it may take there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from fake_gpu import MODELS, fake_gpu, usage
from serving_shapes import LLAMA_8B, SMALL_STEP, SMOLLM2, launch_attention, make_ops

from engine.ops.triton.kernels import decode, prefill

HEADS = {"heads of 64": SMOLLM2, "heads of 128": LLAMA_8B, "heads of 256": replace(LLAMA_8B, head_dim=256)}
ATTENTIONS = {
    f"{str(dtype).removeprefix('torch.')}, {name}": replace(model, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for name, model in HEADS.items()
}
MAX_SPILLED_BYTES = {("sm_80", "float32, heads of 128", "prefill"): 8}
"""(GPU, model, kernel) of those that may spill a little; 16 bytes at most."""


@cache
def compiled_attention(gpu: str, model: str) -> dict[str, list[Any]]:
    """Binaries by the kernel's name."""
    kernels = (decode.decode_parts, decode.decode_sum, prefill.prefill)
    with torch.inference_mode(), fake_gpu(gpu) as fake:
        launch_attention(ATTENTIONS[model], make_ops(ATTENTIONS[model]), SMALL_STEP)
        return {kernel.__name__: fake.binaries(kernel) for kernel in kernels}


def check_fits(gpu: str, model: str, kernel: str, binary: Any) -> None:
    used = usage(binary)
    assert used.shared_bytes <= MODELS[gpu].max_shared_bytes
    assert used.spilled_bytes <= MAX_SPILLED_BYTES.get((gpu, model, kernel), 0), (kernel, used.registers)
    if kernel == "decode_parts":
        assert used.blocks_per_multiprocessor(MODELS[gpu]) >= 2
