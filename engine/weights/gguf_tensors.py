"""From a GGUF file's tensors to one safetensors file in Hugging Face's names and row order.

Quantised tensors become float32, the values that the quantisation stands for, exactly; F32, F16 and
BF16 stay as they are. Memory in use is a few small pieces, whatever the size of the model.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.weights.gguf_config import ROPE_FACTORS_TENSOR, has_experts
from engine.weights.gguf_file import GgufFile, GgufTensor
from protocol.errors import StartupError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_NEEDED_IN_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_LAYER_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_KEPT_KINDS = {0: "F32", 1: "F16", 30: "BF16"}
_CHUNK_BYTES = 1 << 18
"""Of quantised input: its output of a few times that fits in a core's cache."""
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of the file to write."""

    name: str
    source: GgufTensor
    dtype: str
    num_interleaved_heads: int
    """> 0: the source has the two halves of each of that many heads interleaved, row by row."""
    offset: int
    """From the start of the data."""
    num_bytes: int


def write_safetensors(gguf: GgufFile, file: Path, advance: Callable[[int], None]) -> None:
    """Write all tensors of `gguf` to `file`; `advance` hears of bytes written.

    Raises `StartupError` for tensors that are missing, unknown or of a kind that cannot be read.
    """
    outputs = _plan(gguf)
    header = _header(outputs)
    with file.open("wb") as stream:
        stream.write(header)
        stream.flush()
        pieces = list(_pieces(outputs))
        write = _piece_writer(gguf, stream.fileno(), len(header))
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            for num_bytes in pool.map(write, pieces):
                advance(num_bytes)


def written_bytes(gguf: GgufFile) -> int:
    """The size of the data that `write_safetensors` writes."""
    return sum(output.num_bytes for output in _plan(gguf))


def _plan(gguf: GgufFile) -> list[_Output]:
    _check_complete(gguf)
    _check_kinds(gguf)
    outputs: list[_Output] = []
    offset = 0
    for tensor in sorted(gguf.tensors.values(), key=lambda t: t.offset):
        if tensor.name == ROPE_FACTORS_TENSOR:
            continue  # the config says it
        dtype = _KEPT_KINDS.get(tensor.kind, "F32")
        num_bytes = math.prod(tensor.shape) * (4 if dtype == "F32" else 2)
        heads = _num_interleaved_heads(gguf, tensor.name)
        if heads and tensor.num_rows % (2 * heads):
            raise StartupError(
                f"{gguf.path}: {tensor.name!r} has {tensor.num_rows} rows, which are not {heads} heads: "
                "download it again"
            )
        outputs.append(_Output(_hf_name(gguf, tensor.name), tensor, dtype, heads, offset, num_bytes))
        offset += num_bytes
    return outputs


def _hf_name(gguf: GgufFile, name: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match["part"] not in _IN_LAYER:
        raise StartupError(
            f"{gguf.path} holds a tensor that is not known for {gguf.architecture}: {name!r}"
        )
    return f"model.layers.{match['layer']}.{_IN_LAYER[match['part']]}.{match['kind']}"


def _num_interleaved_heads(gguf: GgufFile, name: str) -> int:
    """llama.cpp rotates neighbouring rows where Hugging Face rotates halves, for llama files only."""
    if gguf.architecture != "llama":
        return 0
    num_heads = gguf.count("attention.head_count")
    if ".attn_q." in name:
        return num_heads
    if ".attn_k." in name:
        return gguf.count("attention.head_count_kv", num_heads)
    return 0


def _check_complete(gguf: GgufFile) -> None:
    needed = ["token_embd.weight", "output_norm.weight"]
    for layer in range(
        min(gguf.count("block_count"), len(gguf.tensors) + 1)
    ):  # a corrupt count may be huge
        parts = (*_NEEDED_IN_LAYER, *_mlp_parts(gguf, layer))
        needed += [f"blk.{layer}.{part}.weight" for part in parts]
    missing = [name for name in needed if name not in gguf.tensors]
    if missing:
        raise StartupError(
            f"{gguf.path} lacks {len(missing)} tensors ({missing[0]!r}, ...): get another file"
        )


def _mlp_parts(gguf: GgufFile, layer: int) -> tuple[str, ...]:
    if not has_experts(gguf):
        return _MLP
    if f"blk.{layer}.ffn_gate_up_exps.weight" in gguf.tensors:
        return ("ffn_gate_inp", "ffn_gate_up_exps", "ffn_down_exps")
    return _EXPERTS


def _check_kinds(gguf: GgufFile) -> None:
    """Every storage type in the file must be one that can be turned into numbers."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for kind in sorted({tensor.kind for tensor in gguf.tensors.values()} - set(_KEPT_KINDS)):
        known = GGMLQuantizationType(kind)
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
        except NotImplementedError as error:
            raise StartupError(
                f"{gguf.path} stores tensors as {known.name}, which is not supported: get another file"
            ) from error


def _header(outputs: list[_Output]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for output in outputs:
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": output.source.shape,
            "data_offsets": [output.offset, output.offset + output.num_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN_BYTES)
    return struct.pack("<Q", len(text)) + text


_Piece = tuple[_Output, int, int]
"""Rows from (incl.) to (excl.) of one tensor."""


def _pieces(outputs: list[_Output]) -> Iterator[_Piece]:
    for output in outputs:
        num_rows = output.source.num_rows
        step = max(1, num_rows * _CHUNK_BYTES // output.source.num_bytes)
        for begin in range(0, num_rows, step):
            yield output, begin, min(begin + step, num_rows)


def _piece_writer(gguf: GgufFile, fd: int, data_start: int) -> Callable[[_Piece], int]:
    """A function that converts one piece and writes it to its place; safe to call from many threads."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    def write(piece: _Piece) -> int:
        output, begin, end = piece
        source = output.source
        row_bytes = source.num_bytes // source.num_rows
        rows = np.frombuffer(gguf.data, np.uint8, source.num_bytes, source.offset).reshape(-1, row_bytes)
        raw = rows[_source_rows(output, begin, end)].reshape(1, -1)  # one long row: the quick way through
        values = raw if source.kind in _KEPT_KINDS else dequantize(raw, GGMLQuantizationType(source.kind))
        place = data_start + output.offset + begin * (output.num_bytes // source.num_rows)
        if os.pwrite(fd, values.data, place) != values.nbytes:
            raise OSError(f"could not write all of {output.name!r}")
        return int(values.nbytes)

    return write


def _source_rows(output: _Output, begin: int, end: int) -> slice | NDArray[np.int64]:
    """Where rows `begin` to `end` of the output lie in the source."""
    if not output.num_interleaved_heads:
        return slice(begin, end)
    import numpy as np

    order = np.arange(output.source.num_rows).reshape(output.num_interleaved_heads, -1, 2)
    return order.swapaxes(1, 2).reshape(-1)[begin:end]
