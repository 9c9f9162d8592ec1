"""GGUF files become model folders: weights exactly, config, and a cache that survives crashes."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from weights_samples import (
    FFN,
    HEAD_DIM,
    HIDDEN,
    TEMPLATE,
    gguf_name,
    tensors_of,
    write_gguf,
)

from engine.weights import ModelFolder, demo_model_path, load_weights, resolve_model
from protocol.errors import StartupError

K = GGMLQuantizationType


def convert(gguf: Path) -> ModelFolder:
    return resolve_model(str(gguf), cache_dir=gguf.parent / "cache")


def assert_same(loaded: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_float_file_gives_the_source_weights_bit_exactly(tmp_path: Path, arch: str, tied: bool) -> None:
    tensors = tensors_of(arch, tied=tied)
    folder = convert(write_gguf(tmp_path / "m.gguf", arch, tensors))
    assert_same(load_weights(folder, torch.float32), tensors)
    assert folder.config["tie_word_embeddings"] is tied
    assert folder.config["model_type"] == arch
    assert folder.name == "m"


@pytest.mark.parametrize("kind", [K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.Q8_0, K.F16, K.BF16])
def test_quantised_weights_are_the_values_of_their_blocks(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    """Rows are quantised apart, so the order of rows and the quantisation may be swapped."""
    tensors = tensors_of("llama")
    folder = convert(write_gguf(tmp_path / "m.gguf", "llama", tensors, kind=kind))
    wanted = {
        name: torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        if tensor.ndim > 1
        else tensor
        for name, tensor in tensors.items()
    }
    assert_same(load_weights(folder, torch.float32), wanted)


@pytest.mark.parametrize("kind", [K.Q2_K, K.Q3_K, K.Q4_K, K.Q5_K, K.Q6_K, K.IQ4_NL, K.IQ4_XS, K.IQ3_S])
def test_kinds_that_only_llama_cpp_can_write_are_read(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    tensors = tensors_of("qwen3")
    down = "model.layers.0.mlp.down_proj.weight"
    del tensors[down]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    # Bytes of 0x3x only: as half precision they are small numbers, never infinite
    noise = np.random.default_rng(0).integers(0x30, 0x3B, (HIDDEN, FFN // block_elements * block_bytes))
    blocks = noise.astype(np.uint8)
    folder = convert(
        write_gguf(tmp_path / "m.gguf", "qwen3", tensors, raw={gguf_name(down): (blocks, kind)})
    )
    wanted = torch.from_numpy(dequantize(blocks, kind))
    assert torch.equal(load_weights(folder, torch.float32)[down], wanted)


def test_half_precision_is_kept_as_it_is(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    folder = convert(write_gguf(tmp_path / "m.gguf", "llama", tensors, kind=K.F16))
    assert (folder.path / "model.safetensors").stat().st_size < 3 * sum(t.numel() for t in tensors.values())


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    folder = convert(write_gguf(tmp_path / "m.gguf", "qwen3", tensors_of("qwen3")))
    wanted = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": 304,
        "attention_bias": False,
    }
    assert {key: folder.config[key] for key in wanted} == wanted
    assert folder.eos_token_ids == (2,)
    assert folder.generation_config["bos_token_id"] == 1
    tokenizer_config = json.loads((folder.path / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == TEMPLATE


def test_all_end_tokens_of_the_file_are_kept(tmp_path: Path) -> None:
    gguf = write_gguf(
        tmp_path / "m.gguf", "llama", tensors_of("llama"), more=lambda w: w.add_eot_token_id(0)
    )
    assert convert(gguf).eos_token_ids == (2, 0)


def rope_of(tmp_path: Path, more: Any) -> dict[str, Any]:
    folder = convert(write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"), more=more))
    rope: dict[str, Any] = folder.config["rope_parameters"]
    return rope


def test_linear_and_yarn_scaling_are_carried_over(tmp_path: Path) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    def yarn(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 128)

    assert rope_of(tmp_path, linear) == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert rope_of(tmp_path, yarn) == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def llama3_factors(factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors = []
    for frequency in 1.0 / (10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        low, high = wavelength > 8192 / 1.0, wavelength < 8192 / 4.0
        factors.append(factor if low else 1.0 if high else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_scaling_is_recognised_from_its_factors(tmp_path: Path) -> None:
    factors = llama3_factors(8.0)
    rope = rope_of(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    assert rope == {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def refused(gguf: Path, *words: str) -> None:
    """Converting must fail with all the words, and leave nothing that a next start would trust."""
    with pytest.raises(StartupError) as caught:
        convert(gguf)
    for word in words:
        assert word in caught.value.message
    cache = gguf.parent / "cache"
    assert not [entry for entry in cache.glob("*") if not entry.name.endswith(".lock")]


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    def longrope(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "longrope")

    def odd(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32))

    for name, more in (("a", longrope), ("b", odd)):
        refused(write_gguf(tmp_path / name, "llama", tensors_of("llama"), more=more), "rotary")


def test_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "gemma", tensors_of("llama"))
    refused(gguf, "'gemma'", "llama, qwen2, qwen3")


def test_missing_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    extra = {"blk.0.strange.weight": (np.ones((2, 32), np.float32), K.F32)}
    refused(write_gguf(tmp_path / "a", "llama", tensors, raw=extra), "blk.0.strange.weight")
    del tensors["model.norm.weight"]
    refused(write_gguf(tmp_path / "b", "llama", tensors), "output_norm.weight")


def test_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    gguf = write_gguf(
        tmp_path / "m.gguf", "llama", tensors_of("llama"), more=lambda w: w.add_uint16("split.count", 2)
    )
    refused(gguf, "gguf-split")


@pytest.mark.parametrize("kept", [0, 3, 4, 10, 24, 100, 5000, 0.5, 0.999])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    content = gguf.read_bytes()
    gguf.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    refused(gguf, str(gguf))


def test_corrupt_header_is_refused(tmp_path: Path) -> None:
    """Absurd counts must neither hang nor exhaust the memory."""
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    content = bytearray(gguf.read_bytes())
    for position, value in ((4, 9), (8, 2**62), (16, 2**62), (24, 2**62)):
        broken = bytearray(content)
        struct.pack_into("<Q" if position > 4 else "<I", broken, position, value)
        gguf.write_bytes(broken)
        refused(gguf, str(gguf))


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever the header says, the only way to fail is a `StartupError`."""
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    content = gguf.read_bytes()
    random = np.random.default_rng(0)
    for header_bytes in [900] * 60 + [content.find(b"blk.0.ffn_down")] * 60:
        broken = bytearray(content)
        broken[random.integers(4, header_bytes)] = random.integers(256)
        gguf.write_bytes(broken)
        with contextlib.suppress(StartupError):
            convert(gguf)


def test_second_start_uses_the_first_ones_conversion(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    first = convert(gguf)
    written_ns = (first.path / "model.safetensors").stat().st_mtime_ns
    second = convert(gguf)
    assert second == first
    assert (second.path / "model.safetensors").stat().st_mtime_ns == written_ns


def test_a_changed_file_is_converted_anew(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    first = convert(gguf)
    write_gguf(gguf, "llama", tensors_of("llama", seed=1))
    second = convert(gguf)
    assert second.path != first.path
    assert second.revision != first.revision


def test_copies_of_a_file_have_the_same_revision(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write_gguf(tmp_path / place / f"{place}.gguf", "llama", tensors_of("llama"))
    one, other = (convert(tmp_path / place / f"{place}.gguf") for place in ("a", "b"))
    assert one.revision == other.revision


class _KilledError(BaseException):
    """Stands for whatever ends a process in the middle of a conversion."""


class _KillsHalfWay:
    def start(self, label: str, total_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        raise _KilledError

    def finish(self) -> None:
        pass


def test_interrupted_conversion_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    with pytest.raises(_KilledError):
        resolve_model(str(gguf), cache_dir=tmp_path / "cache", progress=_KillsHalfWay())
    assert all(entry.name.endswith(".lock") for entry in (tmp_path / "cache").iterdir())
    assert_same(load_weights(convert(gguf), torch.float32), tensors_of("llama"))


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    path = convert(gguf).path
    path.rename(path.with_name(f".{path.name}.partial"))
    (path.with_name(f".{path.name}.partial") / "model.safetensors").write_bytes(b"half")
    assert_same(load_weights(convert(gguf), torch.float32), tensors_of("llama"))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [f".{path.name}.lock", path.name]


_CONVERT_AND_REPORT = """
import sys
from pathlib import Path
from engine.weights import resolve_model
folder = resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2]))
print(folder.path, folder.revision, (folder.path / "model.safetensors").stat().st_ino)
assert "torch" not in sys.modules
"""


def test_workers_that_start_at_once_convert_once(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    command = [sys.executable, "-c", _CONVERT_AND_REPORT, str(gguf), str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    reports = {worker.communicate(timeout=60)[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0]
    assert len(reports) == 1


def test_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="choose another cache folder"):
        resolve_model(str(gguf), cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_the_converted_folder_and_gives_the_same_tensors(
    tmp_path: Path, arch: str
) -> None:
    """Names, shapes and config must be what the reference implementation expects, none left over."""
    from transformers import AutoModelForCausalLM

    tensors = tensors_of(arch)
    folder = convert(write_gguf(tmp_path / "m.gguf", arch, tensors))
    model, report = AutoModelForCausalLM.from_pretrained(folder.path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.model
def test_demo_model_is_what_transformers_reads_from_the_same_file(tmp_path: Path) -> None:
    """Its reader, de-quantisation and row order share no code with ours, and must agree bit by bit."""
    from transformers.integrations.gguf.dequant import GGML_BLOCK
    from transformers.integrations.gguf.dequant import dequantize as dequantise
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    folder = resolve_model(str(demo_model_path()), cache_dir=tmp_path)
    loaded = load_weights(folder, torch.float32)
    stored = load_gguf_state_dict(GgufHeader.from_file(str(demo_model_path())))
    order = LlamaTensorProcessor(folder.config)
    assert {gguf_name(name) for name in loaded} == stored.keys()
    for name, tensor in loaded.items():
        source = stored[gguf_name(name)]
        values = source[...]
        if source.ggml_type in GGML_BLOCK:
            values = dequantise(values, source.ggml_type).reshape(tensor.shape)
        wanted = order.process(values.numpy(), gguf_name(name)).weights
        assert torch.equal(tensor, torch.from_numpy(wanted)), name
    assert json.loads((folder.path / "config.json").read_text())["eos_token_id"] == 2
