"""Is everything installed, and is it the same on all nodes?"""

from __future__ import annotations

import ast
import platform
from importlib import metadata, util
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.doctor.facts import NodeFacts, Seen, Versions
from cluster.doctor.findings import Findings, Topic, difference

NEEDED = ("splitserve", "ray", "torch", "nixl", "grpcio", "transformers", "tokenizers", "safetensors")
MUST_BE_EQUAL = ("splitserve", "ray")
"""Processes of one cluster that differ here may not understand each other."""
CHECK = "versions"


def probe_versions() -> Versions:
    """Reads what the installer wrote down; imports nothing."""
    packages: dict[str, str] = {}
    for name in NEEDED:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Versions(platform.python_version(), packages, torch_cuda())


def torch_cuda() -> str | None:
    """From torch's version.py: importing torch takes seconds."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    source = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "cuda" and node.value:
            value = ast.literal_eval(node.value)
            return str(value) if value else None
    return None


def check_versions(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.versions is not None:
            yield from _check_node(node, node.versions, seen.config)
    yield from _compare(seen)


def _check_node(node: NodeFacts, versions: Versions, config: ClusterConfig) -> Findings:
    topic = Topic(node.name, CHECK)
    needed = [name for name in NEEDED if name != "nixl" or config.kv_transfer.transport == "nixl"]
    missing = [name for name in needed if name not in versions.packages]
    if missing:
        yield topic.problem(
            f"not installed: {', '.join(missing)}",
            "pip install -r requirements/serve.txt with this Python"
            if missing != ["splitserve"]
            else "pip install -e .",
        )
        return
    build = f"CUDA {versions.torch_cuda}" if versions.torch_cuda else "for CPUs"
    said = [f"Python {versions.python}", f"torch {versions.packages['torch']} ({build})"]
    shown = [name for name in ("nixl", "ray", "splitserve") if name in versions.packages]
    said += [f"{name} {versions.packages[name]}" for name in shown]
    yield topic.ok(", ".join(said))


def _compare(seen: Seen) -> Findings:
    """Only what differs is told."""
    known = [(node.name, node.versions) for node in seen.nodes if node.versions is not None]
    for name in NEEDED:
        if what := difference(name, {node: v.packages[name] for node, v in known if name in v.packages}):
            todo = f"install the same {name} everywhere"
            topic = Topic("all nodes", CHECK)
            yield topic.problem(what, todo) if name in MUST_BE_EQUAL else topic.warning(what, todo)
    if what := difference("Python", {node: v.python.rpartition(".")[0] for node, v in known}):
        yield Topic("all nodes", CHECK).problem(what, "install the same Python everywhere: Ray asks for it")
