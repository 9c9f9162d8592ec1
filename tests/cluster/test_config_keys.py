"""What the file says reaches the part that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_clusters import tiny_config

from cluster.compose import build_router
from cluster.config import load_config
from cluster.directory import InProcessDirectory
from protocol.errors import StartupError

TOKEN = "t"  # noqa: S105


def test_the_routers_keys_reach_it(tiny_llama: Path) -> None:
    config = tiny_config(
        tiny_llama,
        router__frame_timeout_s=3,
        router__local_prefill_tokens=48,
        router__local_prefill_on_failure=False,
        router__prefill_grace_s=7,
        router__overload_retry_after_s=5,
        router__worker_wait_s=9,
    )
    settings = build_router(config, token=TOKEN, directory=InProcessDirectory()).settings
    assert settings.frame_timeout_s == 3
    assert settings.local_prefill_tokens == 48
    assert not settings.local_prefill_on_failure
    assert settings.prefill_grace_s == 7
    assert settings.retry_after_s == 5
    assert settings.worker_wait_s == 9


def test_a_decode_worker_bounds_what_prompts_cost_the_others_unless_told_otherwise() -> None:
    config = load_config(None, {"decode": {"num_workers": 2}})
    assert config.prefill.max_num_prefill_tokens is None
    assert config.decode.max_num_prefill_tokens == 64
    assert load_config(None, {"decode.max_num_prefill_tokens": None}).decode.max_num_prefill_tokens is None


@pytest.mark.parametrize(
    "key",
    [
        "router.frame_timeout_s",
        "router.worker_wait_s",
        "decode.ageing_tokens",
        "decode.overload_retry_after_s",
    ],
)
def test_a_time_or_number_that_cannot_be_is_refused(key: str) -> None:
    with pytest.raises(StartupError, match=key):
        load_config(None, {key: 0})
