"""`splitserve serve` with several ranks per worker, on Ray: it answers, and heals when one of them dies."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from served_cluster import LOOPBACK, Served, serving, wait_until
from tiny_clusters import tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.timeout(300)]

RANK = "ray::RankActor"


def ranks(served: Served) -> list[psutil.Process]:
    found = []
    for process in served.family():
        try:
            if " ".join(process.cmdline()).startswith(RANK):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_workers_of_two_ranks_answer_and_are_replaced_when_a_rank_dies(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tmp_path)
    with serving(model, tmp_path, "--tensor-parallel-size", "2") as served:
        expected = served.complete(max_tokens=24)["choices"][0]["text"]
        assert len(ranks(served)) == 2
        assert served.listening_addresses() <= LOOPBACK
        victim = ranks(served)[0]
        victim.kill()
        wait_until(lambda: len(ranks(served)) == 2 and victim not in ranks(served), 60, "another rank runs")
        assert served.complete(max_tokens=24, timeout_s=60)["choices"][0]["text"] == expected
