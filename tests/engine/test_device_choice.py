"""Choosing device, number type and threads."""

from __future__ import annotations

import pytest
import torch

from engine.device import limit_threads, memory_bytes, select_device, select_dtype
from protocol.errors import StartupError

CPU = torch.device("cpu")


def test_a_named_device_is_taken() -> None:
    assert select_device("cpu") == CPU


def test_auto_takes_the_gpu_where_there_is_one() -> None:
    assert select_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "mps", ""])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(StartupError):
        select_device(name)


def test_named_dtypes_are_taken_and_others_refused() -> None:
    assert select_dtype("float32", CPU) is torch.float32
    assert select_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(StartupError, match="int4"):
        select_dtype("int4", CPU)


def test_auto_is_bfloat16_only_where_the_processor_multiplies_it() -> None:
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert select_dtype("auto", CPU) is (torch.bfloat16 if fast else torch.float32)


def test_threads_are_set_or_left_alone() -> None:
    before = torch.get_num_threads()
    limit_threads(None)
    assert torch.get_num_threads() == before
    limit_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    with pytest.raises(StartupError):
        limit_threads(0)


def test_free_memory_is_part_of_the_total() -> None:
    free, total = memory_bytes(CPU)
    assert 0 < free <= total
