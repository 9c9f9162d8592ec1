"""Can KV be read between the nodes, how fast, and over the transport that should be there?"""

from __future__ import annotations

from cluster.doctor.facts import BlockRead, NodeFacts, Seen
from cluster.doctor.findings import Finding, Findings, Topic, in_words

CHECK = "read"


def check_reads(seen: Seen) -> Findings:
    nodes = {node.name: node for node in seen.nodes}
    for read in seen.reads:
        yield _check_read(read, nodes.get(read.owner), nodes.get(read.reader))


def _check_read(read: BlockRead, owner: NodeFacts | None, reader: NodeFacts | None) -> Finding:
    topic = Topic(where_of(read), CHECK)
    if read.error:
        return topic.problem(f"no read: {read.error}", _what_to_mend(read, owner))
    transport = read.transport or "a transport that UCX did not name"
    what = (
        f"{in_words(read.num_blocks * read.block_bytes)} in {read.num_blocks} blocks of"
        f" {in_words(read.block_bytes)}: {in_words(read.bytes_per_s)}/s over {transport}"
        f" (first read {read.first_s * 1e3:.0f} ms, later {read.seconds * 1e3:.0f} ms)"
    )
    if better := _missed(read, owner, reader):
        return topic.warning(f"{what}: fell back to TCP where {better[0]} should be", better[1])
    return topic.ok(what)


def where_of(read: BlockRead) -> str:
    return f"{read.owner} -> {read.reader}" if read.owner != read.reader else f"within {read.owner}"


def is_tcp(transport: str) -> bool:
    """Nothing but TCP."""
    used = [part.partition("/")[0] for part in transport.split(" + ") if part]
    return bool(used) and all(name == "tcp" for name in used)


def _missed(read: BlockRead, owner: NodeFacts | None, reader: NodeFacts | None) -> tuple[str, str] | None:
    """What there should have been instead of TCP, and how to get it; None when all is as it should be."""
    if not is_tcp(read.transport):
        return None
    if read.owner == read.reader:
        return "shared memory (cma)", (
            f"{_told(owner)}let processes read each other's memory: the same user and container,"
            " kernel.yama.ptrace_scope 0, or the capability SYS_PTRACE"
        )
    if all(node and node.rdma and node.rdma.is_active for node in (owner, reader)):
        return "RDMA", f"{_told(owner)}see UCX_NET_DEVICES, ulimit -l and /dev/infiniband on both nodes"
    return None


def _told(node: NodeFacts | None) -> str:
    tls = node.ucx.variables.get("UCX_TLS") if node and node.ucx else None
    return f"UCX_TLS is {tls}: unset it; or " if tls else ""


def _what_to_mend(read: BlockRead, owner: NodeFacts | None) -> str:
    if "NIXL cannot be loaded" in read.error:
        return "pip install -r requirements/serve.txt with this Python; without NIXL there is no hand-off"
    if read.owner == read.reader:
        return "see UCX_TLS and UCX_NET_DEVICES; UCX_LOG_LEVEL=info says what it finds"
    return f"{_told(owner)}the nodes must reach each other on all TCP ports; see UCX_NET_DEVICES on both"
