"""Attention of every type and size of head on every GPU: minutes, so only `make test-kernels` has it."""

from __future__ import annotations

import pytest
from compiled_attention import ATTENTIONS, check_fits, compiled_attention
from fake_gpu import MODELS

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("model", ATTENTIONS)
@pytest.mark.parametrize("gpu", MODELS)
def test_attention_fits_for_all_heads_and_types(gpu: str, model: str) -> None:
    for kernel, binaries in compiled_attention(gpu, model).items():
        for binary in binaries:
            check_fits(gpu, model, kernel, binary)
