"""Is the model there on every node, whole, the same, and small enough for the configuration?"""

from __future__ import annotations

from typing import Any

from cluster.compose import survey_configured_model
from cluster.config import ClusterConfig
from cluster.doctor.facts import Model, NodeFacts, Seen
from cluster.doctor.findings import Findings, Topic, difference
from cluster.preflight import check_sizes
from engine.model.config import ModelConfig
from engine.weights import ModelState
from protocol.errors import StartupError

CHECK = "model"


def probe_model(config: ClusterConfig) -> Model:
    """Headers, the index and a few pages of each tensor are read; nothing is downloaded or converted."""
    try:
        found = survey_configured_model(config)
    except StartupError as error:
        return Model(problem=error.message)
    return Model(
        path=found.path,
        state=found.state.value,
        revision=found.revision,
        num_parameters=found.num_parameters,
        config=found.config or {},
        problem=_misfit(config, found.config or {}),
    )


def _misfit(config: ClusterConfig, fields: dict[str, Any]) -> str:
    """Why the configuration cannot work with this model; empty when it can, or that is not known yet."""
    if not fields:
        return ""
    try:
        check_sizes(config, ModelConfig.from_hf(fields))
    except StartupError as error:
        return error.message
    return ""


def check_model(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.model is not None:
            yield from _check_node(node, node.model)
    revisions = {n.name: n.model.revision[:8] for n in seen.nodes if n.model and n.model.revision}
    if what := difference("the model", revisions):
        yield Topic("all nodes", CHECK).problem(what, "copy the same files to all nodes, or share a folder")


def _check_node(node: NodeFacts, model: Model) -> Findings:
    topic = Topic(node.name, CHECK)
    if model.problem:
        yield topic.problem(*_parted(model.problem))
    elif model.state == ModelState.TO_DOWNLOAD.value:
        yield topic.info(
            f"{model.path} is not in the cache here: the first start downloads it, and what memory it needs"
            " is not known yet"
        )
    elif model.state == ModelState.TO_CONVERT.value:
        yield topic.info(f"{model.path} is whole; the first start converts it, once")
    else:
        yield topic.ok(
            f"{model.path}: {model.num_parameters / 1e6:,.0f} million parameters, files are whole"
        )


def _parted(message: str) -> tuple[str, str]:
    """Our own messages end with what to do, behind the last colon."""
    what, colon, todo = message.rpartition(": ")
    return (what, todo) if colon else (message, "correct `model`, or the key that the message names")
