"""A new configuration replaces exactly those replicas that it concerns."""

from __future__ import annotations

import pytest

from cluster.config import load_config
from cluster.deployment_version import version_of

ALL = {"router", "prefill", "decode"}


def versions(token: str = "t", **changes: object) -> dict[str, str]:  # noqa: S107
    config = load_config(None, {key.replace("__", "."): value for key, value in changes.items()})
    return {name: version_of(name, config, token) for name in ALL}


@pytest.mark.parametrize(
    ("changes", "replaced"),
    [
        ({}, set()),
        ({"decode__num_workers": 2, "prefill__num_workers": 3}, set()),
        ({"decode__autoscaling__max_workers": 2}, {"decode"}),
        ({"drain_limit_s": 5, "start_timeout_s": 5}, set()),
        ({"deploy__image": "registry.example/splitserve:2"}, set()),
        ({"decode__max_num_seqs": 32}, {"decode"}),
        ({"prefill__max_num_batched_tokens": 256}, {"prefill"}),
        ({"kv_transfer__lease_s": 5}, {"prefill", "decode"}),
        ({"router__local_prefill_tokens": 64}, {"router"}),
        ({"http__port": 1}, {"router"}),
        ({"tensor_parallel_size": 2}, {"prefill", "decode"}),
        ({"tensor_parallel_size": 2, "prefill__tensor_parallel_size": 1}, {"decode"}),
        ({"decode__pipeline_parallel_size": 2}, {"decode"}),
        ({"ranks__step_timeout_s": 5}, {"prefill", "decode"}),
        ({"model": "another"}, ALL),
    ],
)
def test_only_what_a_change_concerns_is_replaced(changes: dict[str, object], replaced: set[str]) -> None:
    before, after = versions(), versions(**changes)
    assert {name for name in ALL if before[name] != after[name]} == replaced


def test_another_cluster_token_replaces_all() -> None:
    before, after = versions("one"), versions("another")
    assert all(before[name] != after[name] for name in ALL)


def test_bounds_and_delays_of_autoscaling_replace_nobody() -> None:
    before = versions(decode__autoscaling__max_workers=2)
    after = versions(
        decode__autoscaling__max_workers=9,
        decode__autoscaling__min_workers=2,
        decode__autoscaling__downscale_delay_s=1,
    )
    assert before == after
