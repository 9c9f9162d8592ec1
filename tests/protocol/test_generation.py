"""What a request says about itself."""

from __future__ import annotations

import pytest

from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import RequestId

SAMPLING = SamplingParams(max_tokens=8)


@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "num_blocks"), [(10, 1, 3), (11, 1, 3), (12, 1, 4), (12, 3, 6), (1, 1, 1)]
)
def test_first_tokens_and_copies_for_choices_need_blocks_too(
    num_tokens: int, num_choices: int, num_blocks: int
) -> None:
    request = GenerationRequest(RequestId("r"), (1,) * num_tokens, SAMPLING, n=num_choices)
    assert request.num_blocks(block_size=4) == num_blocks


def test_tokens_of_earlier_legs_have_kv_too() -> None:
    request = GenerationRequest(RequestId("r"), (1, 2, 3), SAMPLING, output_token_ids=(4, 5))
    assert request.num_tokens == 5
