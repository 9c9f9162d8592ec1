"""Under which names do experts come? Families differ, and so do ways to save them; here they are made one.

as it is used                                as it may be stored
mlp.gate.weight                              block_sparse_moe.gate.weight
mlp.experts.3.gate_proj.weight               block_sparse_moe.experts.3.w1.weight
mlp.experts.3.up_proj.weight                                          .w3.weight
mlp.experts.3.down_proj.weight                                        .w2.weight
gate_proj and up_proj of all experts         mlp.experts.gate_up_proj [experts, 2 * inner, hidden]
down_proj of all experts                     mlp.experts.down_proj [experts, hidden, inner]
each of the three of all experts             mlp.experts.gate_proj.weight and so on, from GGUF files
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.weights.checkpoint import StoredTensor
from protocol.errors import StartupError

_MIXTRAL = re.compile(r"\.block_sparse_moe\.(gate|experts)\.")
_MIXTRAL_MATRIX = re.compile(r"\.(w[123])\.weight$")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACK = re.compile(r"(?P<prefix>.+\.mlp\.experts)\.(?P<kind>gate_up|gate|up|down)_proj(\.weight)?")
_IN_STACK = {"gate_up": ("gate_proj", "up_proj")}


def one_by_one(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors under the names that are used, with the matrices of all experts apart."""
    for tensor in tensors:
        named = _renamed(tensor)
        match = _STACK.fullmatch(named.name)
        if match is None:
            yield named
        else:
            kinds = _IN_STACK.get(match["kind"], (f"{match['kind']}_proj",))
            yield from _matrices(named, match["prefix"], kinds)


def _renamed(tensor: StoredTensor) -> StoredTensor:
    name = _MIXTRAL.sub(r".mlp.\1.", tensor.name)
    if name == tensor.name:
        return tensor
    name = _MIXTRAL_MATRIX.sub(lambda match: f".{_MIXTRAL_NAMES[match[1]]}.weight", name)
    return replace(tensor, name=name, stored_as=tensor.name)


def _matrices(stack: StoredTensor, prefix: str, kinds: tuple[str, ...]) -> Iterator[StoredTensor]:
    """They lie one after the other, those of an expert together."""
    if len(stack.shape) != 3 or stack.shape[1] % len(kinds):
        raise StartupError(
            f"{stack.file} has {stack.name!r} as {stack.shape}, which are no matrices of experts: "
            "download it again"
        )
    num_experts, num_rows, width = stack.shape
    rows, num_bytes = num_rows // len(kinds), stack.num_bytes // (num_experts * len(kinds) or 1)
    places = [(expert, place, kind) for expert in range(num_experts) for place, kind in enumerate(kinds)]
    for number, (expert, place, kind) in enumerate(places):
        yield replace(
            stack,
            name=f"{prefix}.{expert}.{kind}.weight",
            shape=(rows, width),
            offset=stack.offset + number * num_bytes,
            num_bytes=num_bytes,
            stored_as=stack.stored_as or stack.name,
            matrix=(expert, place * rows),
        )
