"""Are the GPUs that the pools ask for there, can torch use them, and does NVLink join them?"""

from __future__ import annotations

import re

from cluster.doctor.commands import Run, run_command
from cluster.doctor.facts import Gpu, Gpus, NodeFacts, Seen
from cluster.doctor.findings import Findings, Topic, in_words

QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.free,driver_version",
    "--format=csv,noheader,nounits",
)
TOPOLOGY = ("nvidia-smi", "topo", "-m")
CHECK = "gpus"
_CUDA = re.compile(r"CUDA (?:UMD )?Version *: *([\d.]+)")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def probe_gpus(run: Run = run_command) -> Gpus:
    """What nvidia-smi says; nothing where it is not installed. Raises `StartupError` when it fails."""
    listed = run(QUERY)
    if listed is None:
        return Gpus()
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    devices = tuple(Gpu(int(row[0]), row[1], _mib(row[2]), _mib(row[3])) for row in rows)
    version = _CUDA.search(run(("nvidia-smi",)) or "")
    return Gpus(
        driver=rows[0][4] if rows else "",
        cuda=version[1] if version else "",
        devices=devices,
        links=parse_topology(run(TOPOLOGY) or "") if len(devices) > 1 else {},
    )


def _mib(text: str) -> int:
    """Some devices, which share the host's memory, say [N/A]."""
    return int(text) * 2**20 if text.isdigit() else 0


def parse_topology(text: str) -> dict[str, str]:
    """By pair of GPUs, the lower first, how they are joined."""
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines() if line.strip()]
    names = [name for name in (lines[0] if lines else []) if re.fullmatch(r"GPU\d+", name)]
    links: dict[str, str] = {}
    for row in lines[1:]:
        if row[0] not in names:
            continue
        for name, link in zip(names, row[1:], strict=False):
            if int(row[0][3:]) < int(name[3:]):
                links[f"{row[0][3:]}-{name[3:]}"] = link
    return links


def check_gpus(seen: Seen) -> Findings:
    config = seen.config
    num_wanted = sum(
        pool.least_num_workers * config.layout_of(pool).num_ranks * pool.num_gpus
        for pool in (config.prefill, config.decode)
    )
    known = [node for node in seen.nodes if node.gpus is not None]
    for node in known:
        yield from _check_node(node, node.gpus or Gpus(), needs_gpus=num_wanted > 0)
    num_found = sum(len(node.gpus.devices) for node in known if node.gpus)
    if num_wanted > num_found and known:
        yield Topic("config", CHECK).problem(
            f"the pools ask for {num_wanted:g} GPUs, and {num_found} are visible",
            "lower num_workers or num_gpus of a pool, or look at the driver and CUDA_VISIBLE_DEVICES",
        )


def _check_node(node: NodeFacts, gpus: Gpus, *, needs_gpus: bool) -> Findings:
    topic = Topic(node.name, CHECK)
    if not gpus.devices:
        yield topic.info("no GPU: engines here compute on the CPU")
        return
    names = ", ".join(sorted({gpu.name for gpu in gpus.devices}))
    free = in_words(min(gpu.free_bytes for gpu in gpus.devices))
    yield topic.ok(
        f"{len(gpus.devices)} x {names}, driver {gpus.driver} (CUDA up to {gpus.cuda or '?'}),"
        f" at least {free} free each"
    )
    if needs_gpus:
        yield from _check_build(node, gpus)
    yield from _check_links(topic, gpus)


def _check_build(node: NodeFacts, gpus: Gpus) -> Findings:
    topic = Topic(node.name, CHECK)
    if node.versions is None or "torch" not in node.versions.packages:
        return
    built_for = node.versions.torch_cuda
    if built_for is None:
        yield topic.problem(
            "torch is a build for CPUs, and the pools ask for GPUs",
            "make serve TORCH_INDEX= installs the CUDA build",
        )
    elif gpus.cuda and _major(built_for) > _major(gpus.cuda):
        yield topic.problem(
            f"torch was built for CUDA {built_for}, and the driver runs CUDA up to {gpus.cuda}",
            "update the driver, or install torch for an older CUDA",
        )


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def _check_links(topic: Topic, gpus: Gpus) -> Findings:
    if not gpus.links:
        return
    apart = [pair for pair, link in gpus.links.items() if not link.startswith("NV")]
    if not apart:
        yield topic.ok("NVLink joins all GPUs")
    elif len(apart) == len(gpus.links):
        yield topic.info("no NVLink: KV moves between GPUs over PCIe")
    else:
        yield topic.info(
            f"NVLink joins {len(gpus.links) - len(apart)} of {len(gpus.links)} pairs;"
            f" not {', '.join(apart[:4])}"
        )
