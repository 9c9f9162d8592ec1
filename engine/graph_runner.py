"""Captures a step as a CUDA graph (or a HIP one): the device repeats all its launches by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.captured_decoding import Capture
from engine.ops import Ops, Recording

_NUM_WARM_UPS = 2
"""What is done before: kernels are compiled and loaded, and libraries make their workspaces."""


def capture_for(ops: Ops, device: torch.device) -> Capture | None:
    """None where nothing is captured: on CPUs, and with ops that plan on the host what a step holds."""
    if device.type != "cuda" or ops.attention_waits:
        return None
    return GraphCapture(device)


class GraphCapture:
    """Implements `Capture`. All graphs share one pool of memory, since one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Recording:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = work()
        return Recording(output, graph.replay)
