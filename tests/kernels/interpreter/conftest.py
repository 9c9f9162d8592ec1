"""Every test here runs with the interpreter repaired, and with all accesses to memory checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interpreter_repairs import repaired


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode(), repaired() as check:
        check.is_on = True
        yield
    torch.set_num_threads(before)
