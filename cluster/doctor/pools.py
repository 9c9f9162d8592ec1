"""Do the settings of the two pools go together?"""

from __future__ import annotations

from cluster.config import ClusterConfig, PoolConfig
from cluster.doctor.facts import Seen
from cluster.doctor.findings import Findings, Topic
from cluster.preflight import least_element_bytes
from kv_transfer import check_compatible
from protocol.errors import LayoutMismatch, StartupError
from protocol.handoff import Fingerprint
from protocol.ids import Role

CHECK = "pools"


def check_pools(seen: Seen) -> Findings:
    yield from _check_configured(seen.config)
    yield from _check_live(seen)


def _check_configured(config: ClusterConfig) -> Findings:
    topic = Topic("config", CHECK)
    findings = [*_differences(config, topic), *_impossible(config, topic)]
    yield from findings or [topic.ok(f"both: dtype {config.dtype}, blocks of {config.block_size} tokens")]


def _differences(config: ClusterConfig, topic: Topic) -> Findings:
    """What works, at a price."""
    dtypes = _dtype(config, config.prefill), _dtype(config, config.decode)
    if dtypes[0] != dtypes[1]:
        yield topic.warning(
            f"prefill computes in {dtypes[0]}, decode in {dtypes[1]}: all KV is converted on its way, and"
            " tokens may differ from those of one engine",
            "set `dtype` alone, for both pools, unless that is what you want",
        )
    sizes = config.block_size_of(config.prefill), config.block_size_of(config.decode)
    if sizes[0] != sizes[1]:
        yield topic.warning(
            f"blocks of {sizes[0]} tokens in prefill, of {sizes[1]} in decode: the reader repacks all KV,"
            " which costs CPU time",
            "set `block_size` alone, for both pools, unless that is what you want",
        )


def _dtype(config: ClusterConfig, pool: PoolConfig) -> str:
    """Where it can be known, what auto becomes."""
    dtype = config.dtype_of(pool)
    return "float32" if dtype == "auto" and least_element_bytes(config, pool) == 4 else dtype


def _impossible(config: ClusterConfig, topic: Topic) -> Findings:
    """What no start would survive."""
    if config.kv_transfer.transport == "loopback":
        yield topic.problem(
            "kv_transfer.transport is loopback, which works within one process only",
            "leave it out, or set it to nixl",
        )
    on_gpus = [bool(config.pool(role).num_gpus) for role in Role]
    if config.kv_transfer.transport == "nccl" and not all(on_gpus):
        yield topic.problem(
            "kv_transfer.transport is nccl, which moves KV between GPUs, and a pool has none",
            "give both pools GPUs (num_gpus), or set it to nixl or gloo",
        )
    if config.kv_transfer.transport == "gloo" and any(on_gpus):
        yield topic.problem(
            "kv_transfer.transport is gloo, which moves host memory, and num_gpus puts a pool on GPUs",
            "set it to nixl or nccl",
        )
    if config.kv_transfer.checksum and (config.prefill.num_gpus or config.decode.num_gpus):
        yield topic.problem(
            "kv_transfer.checksum needs pools in host memory, and num_gpus puts one on GPUs",
            "set kv_transfer.checksum to false",
        )


def _check_live(seen: Seen) -> Findings:
    """One line per pair of kinds that refuse each other."""
    fingerprints = {
        role: {a.record.fingerprint for a in seen.live.workers if a.record.role is role} for role in Role
    }
    for mine in sorted(fingerprints[Role.DECODE], key=str):
        for theirs in sorted(fingerprints[Role.PREFILL], key=str):
            if refusal := why_refused(mine, theirs):
                yield Topic("workers", CHECK).problem(
                    f"decode workers refuse KV of prefill workers: {refusal}",
                    "give both pools the same model and version; a rolling update mends itself",
                )


def why_refused(mine: Fingerprint, theirs: Fingerprint) -> str:
    """What differs that cannot be converted; empty when KV can pass."""
    try:
        check_compatible(mine, theirs)
    except (LayoutMismatch, StartupError) as error:
        return "; ".join(mine.differences(theirs)) or error.message
    return ""
