"""Which device and number type the engine computes with. The only file that touches `torch.cuda`."""

from __future__ import annotations

import torch

from protocol.errors import StartupError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def select_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:<index>`, or `auto`: a GPU where there is one.

    Raises `StartupError` for a GPU that is not there.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"no such device: {name!r}; use auto, cpu, cuda or cuda:<index>") from error
    if device.type not in {"cpu", "cuda"}:
        raise StartupError(f"the engine runs on cpu and cuda, not on {device.type!r}")
    if device.type == "cuda" and (not available or (device.index or 0) >= torch.cuda.device_count()):
        raise StartupError(f"the device {name!r} is not there; use --device cpu, or check the GPU's driver")
    return device


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """`float32`, `bfloat16`, or `auto`: bfloat16 where the hardware multiplies it, else float32."""
    if name == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise StartupError(f"the number type {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        supported: bool = torch.cuda.is_bf16_supported(including_emulation=False)
        return supported
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limit_threads(num_threads: int | None) -> None:
    """Set how many threads torch computes with in this process; None keeps torch's own choice.

    Two engines that share a machine must share its cores: torch's threads spin, and with more of them
    than cores both engines are several times slower.
    """
    if num_threads is None:
        return
    if num_threads < 1:
        raise StartupError(f"an engine needs at least one thread, not {num_threads}")
    torch.set_num_threads(num_threads)


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device; of the machine for a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total
