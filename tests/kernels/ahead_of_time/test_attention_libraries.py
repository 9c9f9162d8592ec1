"""flashinfer and flash-attn-4 are called as they are documented, and give what the port asks for.

By stand-ins with their signatures: neither library runs without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attention_library_fakes as fakes
import pytest
import torch
from attention_samples import BLOCK_SIZE, make_cache, make_layout, naive_attention
from fake_gpu import fake_gpu

from engine.graph_runner import capture_for
from engine.ops import BatchLayout, Ops, RotatingAttention, UploadedAttention, choose_ops
from engine.ops.gpu_attention import LibraryOps, ops_with_library
from engine.ops.gpu_attention.flash_infer import FlashInfer
from protocol.errors import StartupError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LIBRARIES = ["flashinfer", "flash_attn_4"]
EXTRAS = {"flashinfer": "splitserve[flashinfer]", "flash_attn_4": "splitserve[flash-attn-4]"}
HEADS = (4, 2, 64)
MIXES = {
    "one token": [(1, 1)],
    "decodes": [(1, 1), (16, 1), (17, 1), (128, 1), (257, 1)],
    "chunks": [(33, 7), (64, 17), (16, 16)],
    "both": [(40, 1), (20, 20), (70, 9), (5, 1)],
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer, interface = ModuleType("flashinfer"), ModuleType("flash_attn.cute.interface")
    for wrapper in (fakes.BatchDecodeWithPagedKVCacheWrapper, fakes.BatchPrefillWithPagedKVCacheWrapper):
        setattr(flashinfer, wrapper.__name__, wrapper)
    vars(interface)["flash_attn_varlen_func"] = fakes.flash_attn_varlen_func
    modules = {"flashinfer": flashinfer, "flash_attn.cute.interface": interface}
    for name in ("flash_attn", "flash_attn.cute"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("engine.ops.gpu_attention.flash_infer.WORKSPACE_BYTES", 64)


def make_ops(library: str, gpu: str = "sm_90", head_dim: int = 64) -> LibraryOps:
    with fake_gpu(gpu):
        return ops_with_library(library, CPU, torch.bfloat16, head_dim=head_dim)


def check(ops: Ops, layout: BatchLayout, window: int | None, num_padded: int = 0) -> None:
    num_heads, num_kv_heads, head_dim = HEADS
    cache = make_cache(num_kv_heads, head_dim, num_blocks=100).bfloat16()
    # As `rotate_and_write` returns them: a view of rows that hold keys and values, too.
    rows = torch.randn(layout.num_rows + num_padded, num_heads + 2 * num_kv_heads, head_dim).bfloat16()
    queries = rows[:, :num_heads]
    attended = ops.attention(layout, cache).attend(1, queries, window)
    assert (attended.shape, attended.dtype) == (queries.shape, queries.dtype)
    expected = naive_attention(layout, cache.float(), 1, queries.float(), window)
    torch.testing.assert_close(attended.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("window", [None, 1, 21])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_library_sees_exactly_the_causal_window(library: str, mix: str, window: int | None) -> None:
    check(make_ops(library), make_layout(MIXES[mix]), window)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_given_no_padding(library: str) -> None:
    check(make_ops(library), make_layout([(20, 1), (5, 1)]), None, num_padded=2)
    check(make_ops(library), make_layout([(20, 7), (5, 1)]), None, num_padded=3)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("library", LIBRARIES)
def test_layout_is_read_when_the_step_is_computed(library: str) -> None:
    layout, cache = make_layout([(40, 1), (33, 1)]), make_cache(3, 64, num_blocks=100).bfloat16()
    contexts = layout.context_lens.copy()
    layout.context_lens[:] = 1
    attention = make_ops(library).attention(layout, cache)
    layout.context_lens[:] = contexts
    queries = torch.randn(2, 6, 64).bfloat16()
    expected = naive_attention(layout, cache.float(), 0, queries.float(), None)
    attended = attention.attend(0, queries, None).float()
    torch.testing.assert_close(attended, expected, rtol=1e-2, atol=1e-2)


def test_flashinfer_plans_once_per_step_and_window(installed: None) -> None:
    library = FlashInfer(sys.modules["flashinfer"], CPU)
    cache = make_cache(3, 64, num_blocks=100).bfloat16()

    def attend(step: Any, *windows: int | None) -> None:
        for layer, window in enumerate(windows):
            step.attend(layer, torch.randn(2, 6, 64).bfloat16(), window)

    def make_step(contexts: list[int]) -> Any:
        return library.step(make_layout([(context, 1) for context in contexts]), no_tables, cache)

    first, second = make_step([20, 4]), make_step([7, 35])
    attend(first, None, 21, None)
    assert plans(library) == [1, 1]
    attend(second, None)
    attend(first, None)  # whose plan is no longer the wrapper's
    assert plans(library) == [3, 1]


def plans(library: FlashInfer) -> list[int]:
    return [planned.wrapper.num_plans for planned in library._planned.values()]


def no_tables() -> Any:
    raise AssertionError("flashinfer has no use for these")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("library", LIBRARIES)
def test_keys_are_written_by_triton_and_nothing_is_captured(library: str) -> None:
    ops = make_ops(library)
    layout, cache = make_layout([(20, 1), (5, 1)]), make_cache(3, 64).bfloat16()
    with fake_gpu("sm_90") as gpu:
        attention = ops.attention(layout, cache)
        attention.write(0, torch.zeros(2, 3, 64).bfloat16(), torch.zeros(2, 3, 64).bfloat16())
        assert len(gpu.launches) == 1
    assert isinstance(attention, RotatingAttention)
    assert not isinstance(attention, UploadedAttention)
    assert capture_for(ops, GPU) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("library", "dtype", "head_dim", "gpu", "reason"),
    [
        ("flashinfer", torch.float32, 64, "sm_90", "float16 and bfloat16, not in torch.float32"),
        ("flash_attn_4", torch.float32, 64, "sm_90", "float16 and bfloat16, not in torch.float32"),
        ("flashinfer", torch.bfloat16, 80, "sm_90", "64, 128 or 256 numbers, not of 80"),
        ("flash_attn_4", torch.bfloat16, 100, "sm_90", "not of 100"),
        ("flash_attn_4", torch.bfloat16, 64, "sm_80", "9.x, 10.x, 11.x, not on 80"),
        ("flashinfer", torch.bfloat16, 64, "gfx942", "NVIDIA GPUs"),
    ],
)
def test_what_a_library_cannot_compute_is_refused_at_the_start(
    library: str, dtype: torch.dtype, head_dim: int, gpu: str, reason: str
) -> None:
    with fake_gpu(gpu), pytest.raises(StartupError, match=reason) as refused:
        choose(library, GPU, dtype, head_dim)
    assert "attention: triton" in refused.value.message


def choose(library: str, device: torch.device, dtype: Any, head_dim: int = 64) -> Ops:
    return choose_ops(
        device, dtype, head_dim=head_dim, num_threads=1, cache_dir=Path("unused"), attention=library
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_missing_package_is_named_with_its_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with fake_gpu("sm_90"), pytest.raises(StartupError) as missing:
        choose(library, GPU, torch.bfloat16)
    assert f"pip install '{EXTRAS[library]}'" in missing.value.message


@pytest.mark.parametrize("library", LIBRARIES)
def test_cpu_is_refused_rather_than_served_by_something_else(library: str) -> None:
    with pytest.raises(StartupError, match="is for GPUs, but this engine computes on cpu"):
        choose(library, CPU, torch.float32)


@pytest.mark.usefixtures("installed")
def test_flash_attention_4_refuses_blocks_that_it_may_load_as_a_whole() -> None:
    layout = make_layout([(20, 1)])
    cache = torch.zeros(4, 1, 2, 3, 4 * BLOCK_SIZE, 64, dtype=torch.bfloat16)
    with pytest.raises(StartupError, match="set block_size to 32 at most"):
        make_ops("flash_attn_4").attention(layout, cache)


def test_default_is_triton_and_needs_no_library() -> None:
    with fake_gpu("sm_90"):
        ops = choose("triton", GPU, torch.bfloat16)
    assert ops.name == "Triton"
    assert not ops.attention_waits
