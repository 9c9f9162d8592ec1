"""What the compiler makes of every kernel, for GPUs that need not be there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from compiled_attention import check_fits, compiled_attention
from fake_gpu import MODELS, FakeDriver, Usage, fake_gpu, usage
from serving_shapes import (
    LLAMA_8B,
    SMALL_STEP,
    ServedModel,
    launch_attention,
    launch_moves,
    launch_step,
    make_ops,
)
from triton.runtime.errors import OutOfResources

from engine.ops import TorchOps, choose_ops
from engine.ops.triton import TritonOps, Tuning
from engine.ops.triton.kernels import blocks, decode, prefill, rowwise
from engine.ops.triton.tuning import Tile

KERNELS = [
    decode.decode_parts,
    decode.decode_sum,
    prefill.prefill,
    rowwise.rms_norm,
    rowwise.silu_mul,
    rowwise.rope,
    rowwise.rope_and_write,
    rowwise.write_kv,
    blocks.move_parts,
]
NUM_VARIANTS = {"rms_norm": 3, "move_parts": 2}
"""Those with more than one binary: norms of rows, with a residual, and of heads; gather and scatter."""
SERVING_STEPS = [
    [(1, 1)],
    [(16, 1)] * 16,
    [(1 + 37 * number, 1) for number in range(33)],
    [(128, 128)],
    [(2048, 1), (513, 513), (100, 3)],
]

pytestmark = pytest.mark.timeout(600)
"""The first test of each GPU compiles all kernels: 10 s, and minutes on a machine with other work."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def model_on(gpu: str) -> ServedModel:
    """An 8B model: in bfloat16, and once in float16. `all_heads_and_types` compiles the others."""
    return replace(LLAMA_8B, dtype=torch.float16) if gpu == "gfx942" else LLAMA_8B


@cache
def compiled(name: str) -> dict[str, list[Any]]:
    """All kernels of an 8B model, by name."""
    model = model_on(name)
    with torch.inference_mode(), fake_gpu(name) as gpu:
        for step in (SMALL_STEP, *SERVING_STEPS):
            launch_step(model, make_ops(model), step)
        for num_blocks in (1, 3, 16, 48):
            launch_moves(model, num_blocks)
        return {kernel.__name__: gpu.binaries(kernel) for kernel in KERNELS}


every_gpu = pytest.mark.parametrize("gpu", MODELS)


@every_gpu
def test_every_kernel_fits_and_keeps_its_numbers_in_registers(gpu: str) -> None:
    for kernel, binaries in compiled(gpu).items():
        for binary in binaries:
            check_fits(gpu, "llama", kernel, binary)


@every_gpu
def test_one_binary_serves_all_shapes(gpu: str) -> None:
    """Another one would be a wait for the compiler while users wait, or a failed capture."""
    counts = {kernel: len(binaries) for kernel, binaries in compiled(gpu).items()}
    assert counts == {kernel.__name__: NUM_VARIANTS.get(kernel.__name__, 1) for kernel in KERNELS}


def test_attention_in_float32_fits_where_it_is_nearest_to_spilling() -> None:
    """As `all_heads_and_types` shows, which takes minutes."""
    for kernel, binaries in compiled_attention("sm_80", "float32, heads of 128").items():
        for binary in binaries:
            check_fits("sm_80", "float32, heads of 128", kernel, binary)


def prefill_usage(gpu: str) -> Usage:
    return usage(compiled(gpu)["prefill"][0])


def count(used: Usage, prefix: str) -> int:
    return sum(number for opcode, number in used.opcodes.items() if opcode.startswith(prefix))


def test_prefill_uses_the_tensor_cores_of_each_generation() -> None:
    assert count(prefill_usage("sm_80"), "mma.sync") > 0
    assert count(prefill_usage("sm_90"), "wgmma.mma_async") > 0
    assert count(prefill_usage("sm_90"), "mma.sync") == 0
    assert count(prefill_usage("sm_100"), "tcgen05.mma") > 0
    assert count(prefill_usage("gfx942"), "v_mfma") > 0
    memory = compiled("sm_100")["prefill"][0].metadata.tmem_size
    assert 0 < memory <= 512


@every_gpu
def test_decode_uses_tensor_cores(gpu: str) -> None:
    used = usage(compiled(gpu)["decode_parts"][0])
    assert count(used, "v_mfma" if gpu == "gfx942" else "mma.sync") > 0


def test_keys_and_values_are_copied_in_pieces_of_16_bytes() -> None:
    code = compiled("sm_90")["decode_parts"][0].asm["ptx"]
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x(\w+)", code)
    assert copies.count("10") >= 32
    assert "v4.b32" in compiled("sm_90")["move_parts"][0].asm["ptx"]


def test_planted_spill_is_caught() -> None:
    """A quarter of the warps that the tile takes."""
    tile = Tile(64, 1, 2)
    with fake_gpu("sm_80") as gpu:
        launch_attention(LLAMA_8B, TritonOps(Tuning(tile, tile, num_multiprocessors=108)), [(70, 1)])
        (binary,) = gpu.binaries(decode.decode_parts)
    assert usage(binary).spilled_bytes > 16
    with pytest.raises(AssertionError):
        check_fits("sm_80", "planted", "prefill", binary)


def test_planted_lack_of_shared_memory_is_refused_as_by_the_device() -> None:
    needed = compiled("sm_90")["prefill"][0].metadata.shared
    with fake_gpu("sm_90", max_shared_bytes=needed - 1), pytest.raises(OutOfResources):
        launch_attention(LLAMA_8B, make_ops(LLAMA_8B), [(70, 70)])


@triton.jit
def specialised(target, count):
    tl.store(target, count)


def test_planted_second_binary_is_caught() -> None:
    with fake_gpu("sm_90") as gpu:
        for number in (1, 2, 16):
            specialised[(1,)](torch.zeros(1, dtype=torch.int32), number, enable_fp_fusion=True)
        assert len(gpu.binaries(specialised)) == 3


def launches(gpu: FakeDriver) -> list[Any]:
    taken, gpu.launches[:] = list(gpu.launches), []
    return taken


def test_launches_of_a_step_depend_on_its_size_alone() -> None:
    """Whatever the sequences hold: what is captured for one step is right for the next."""
    with fake_gpu("sm_90") as gpu:
        ops = make_ops(LLAMA_8B)
        seen = []
        for step in ([(1, 1)] * 4, [(2000, 1), (3, 1), (77, 1), (16, 1)]):
            launch_step(LLAMA_8B, ops, step)
            seen.append(launches(gpu))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9 * LLAMA_8B.num_layers


def test_engine_on_a_gpu_gets_triton(tmp_path: Any) -> None:
    arguments: dict[str, Any] = {"num_threads": 1, "cache_dir": tmp_path}
    gpu = torch.device("cuda")
    with fake_gpu("sm_90"):
        assert isinstance(choose_ops(gpu, torch.bfloat16, head_dim=128, **arguments), TritonOps)
        assert isinstance(choose_ops(gpu, torch.bfloat16, head_dim=512, **arguments), TorchOps)
        assert isinstance(choose_ops(gpu, torch.float64, head_dim=128, **arguments), TorchOps)


def test_no_gpu_that_triton_knows_is_said_in_one_line(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ops = choose_ops(torch.device("cuda"), torch.bfloat16, head_dim=128, num_threads=1, cache_dir=tmp_path)
    assert isinstance(ops, TorchOps)
    assert "finds no GPU" in caplog.messages[0]


def test_splits_fill_the_gpu_and_no_more() -> None:
    tuning = Tuning(Tile(64, 4, 3), Tile(64, 4, 3), num_multiprocessors=132)
    assert [tuning.num_splits(8 * batch) for batch in (1, 2, 8, 64, 256)] == [64, 32, 8, 1, 1]
