"""Tiny GGUF files and model folders for the tests of engine.weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 2, 64, 304
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXTS = (
    "Hello, world! It's 2024; we'll see 3.14 and 1,000,000.",
    "def f(x):\n    return x ** 2  # twelve\n\n\tif a  ==  b: pass",
    "你好,世界。日本語 한국어 naïve café 👋🏽👨‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "  leading and trailing  \r\n",
)
Quantise = GGMLQuantizationType
Writes = Callable[[GGUFWriter], None]


def tensors_of(
    arch: str, *, tied: bool = True, seed: int = 0, num_experts: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights of a one-layer model, in Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (FFN, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, FFN),
        "model.norm.weight": (HIDDEN,),
    }
    if arch == "qwen2":
        shapes |= {
            f"{layer}.self_attn.{p}_proj.bias": shapes[f"{layer}.self_attn.{p}_proj.weight"][:1]
            for p in "qkv"
        }
    if arch in {"qwen3", "qwen3moe"}:
        shapes |= {f"{layer}.self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
    if num_experts:
        for kind in ("gate_proj", "up_proj", "down_proj"):
            shape = shapes.pop(f"{layer}.mlp.{kind}.weight")
            shapes |= {
                f"{layer}.mlp.experts.{expert}.{kind}.weight": shape for expert in range(num_experts)
            }
        shapes[f"{layer}.mlp.gate.weight"] = (num_experts, HIDDEN)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[module]}.{kind}"


def stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """llama.cpp's stacks of a one-layer model, by GGUF name."""
    return {
        f"blk.0.ffn_{kind}_exps.weight": np.stack(
            [tensor.numpy() for name, tensor in tensors.items() if name.endswith(f".{kind}_proj.weight")]
        )
        for kind in ("gate", "up", "down")
    }


def llama_rows(name: str, weight: np.ndarray) -> np.ndarray:
    """llama.cpp's order of the q and k rows, as its converter makes it."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    heads = HEADS if "q_proj" in name else KV_HEADS
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def trained_tokenizer() -> Tokenizer:
    """Byte-level, with a few merges; ids 0, 1, 2 are the special tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False, special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator(list(TEXTS) * 4, trainer)
    return tokenizer


def add_byte_level_vocabulary(writer: GGUFWriter, pre: str) -> None:
    model = json.loads(trained_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    kind: GGMLQuantizationType = Quantise.F32,
    pre: str = "gpt-2",
    vocabulary: Writes | None = None,
    more: Writes | None = None,
    raw: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
) -> Path:
    """A complete file; matrices are stored as `kind`, `raw` stores its own bytes under GGUF names."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if vocabulary is None:
        add_byte_level_vocabulary(writer, pre)
    else:
        vocabulary(writer)
    if more is not None:
        more(writer)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        stored = llama_rows(name, values) if arch == "llama" else values
        stored_kind = kind if values.ndim > 1 else Quantise.F32
        writer.add_tensor(gguf_name(name), quantize(stored, stored_kind), raw_dtype=stored_kind)
    for name, (data, raw_kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path: Path, tensors: Mapping[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A folder with one weight file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file(dict(tensors_of("llama") if tensors is None else tensors), path / "model.safetensors")
    return path


def shard_folder(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder with two shards and an index."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, path / shard)
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path
