"""A cluster of plain processes: whoever dies is replaced, and in the end nobody is left."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.processes import DIRECTORY, ProcessCluster
from rpc import wait_until


@pytest.mark.nixl
@pytest.mark.timeout(300)
async def test_every_process_is_replaced_and_none_is_left(tmp_path: Path) -> None:
    config = tiny_config(tiny_model("llama", tmp_path), decode__num_workers=2)
    seen: set[psutil.Process] = set()
    async with ProcessCluster(config, log_dir=tmp_path) as cluster, httpx.AsyncClient(timeout=60) as client:
        async with cluster.http() as url:

            async def answers() -> bool:
                body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
                return (await client.post(f"{url}/v1/completions", json=body)).status_code == 200

            assert await answers()
            for name in ("prefill-0", "decode-0", DIRECTORY):
                victim = cluster.kill(name)
                successor = await cluster.wait_until_replaced(victim, timeout_s=60)
                assert successor.num_starts == 2
                seen |= {psutil.Process(p.pid) for p in cluster.processes()}
            await cluster.wait_until_ready(timeout_s=60)
            assert await answers()

            drained = await cluster.drain("decode-1", limit_s=30)
            successor = await cluster.wait_until_replaced(drained, timeout_s=60)
            assert successor.ended_because == "drained; to be replaced"

            cluster.pause("decode-0")
            paused = psutil.Process(cluster.process("decode-0").pid)
            assert await wait_until(lambda: paused.status() == psutil.STATUS_STOPPED, 10)
            cluster.resume("decode-0")

            cluster.remove("prefill-0")
            cluster.restore("prefill-0")
            await cluster.wait_until_ready(timeout_s=60)
            assert await answers()
            await cluster.wait_until_idle(timeout_s=30)
        cluster.pause("decode-1")  # the end must not depend on its help
        seen |= {psutil.Process(p.pid) for p in cluster.processes()}
    assert len(seen) >= 4
    assert not [process for process in seen if process.is_running()]
