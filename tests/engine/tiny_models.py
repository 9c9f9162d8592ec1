"""Tiny random models of every supported kind, in transformers and in the engine, and how to run both."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch

from engine.kv_cache import KvCache
from engine.model import DecoderModel, ModelConfig
from engine.model.weights import pack_weights
from engine.ops import Ops, TorchOps
from engine.plan import Slice, StepPlan
from engine.runner import ModelRunner
from engine.sequence import Sequence
from protocol.generation import SamplingParams, Token
from protocol.ids import BlockId, SequenceId

CPU = torch.device("cpu")
BLOCK_SIZE = 16
VOCAB_SIZE = 320

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QWEN3_MOE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 96}),
    "llama_biased": ("Llama", {"hidden_size": 96, "attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"hidden_size": 96, "tie_word_embeddings": True, "rope_theta": 100000.0}),
    "llama3_rope": (
        "Llama",
        {
            "hidden_size": 96,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "linear_rope": ("Llama", {"hidden_size": 96, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic_rope": ("Llama", {"hidden_size": 96, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn_rope": (
        "Qwen2",
        {
            "num_attention_heads": 4,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_sliding": ("Mistral", {"sliding_window": 21}),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "tie_word_embeddings": True}),
    "qwen2_sliding": (
        "Qwen2",
        {
            "num_attention_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    "multi_head": ("Llama", {"hidden_size": 96, "num_key_value_heads": 6}),
    "one_kv_head": ("Llama", {"hidden_size": 96, "num_key_value_heads": 1}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_sliding": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 21},
    ),
    "qwen3_moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {**QWEN3_MOE, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 40},
    ),
}


@dataclass(frozen=True)
class Twins:
    """The same random weights in both implementations."""

    reference: Any
    config: ModelConfig
    model: DecoderModel

    def new_runner(self, num_blocks: int = 200) -> ModelRunner:
        cache = KvCache(
            self.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=self.model.dtype, device=CPU
        )
        return ModelRunner(self.model, cache, self.config.eos_token_ids)


def make_reference(kind: str, **changes: Any) -> Any:
    """A transformers model with lively random weights, biases and norms included."""
    import transformers

    family, special = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **special, **changes})
    torch.manual_seed(1234)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    return model


def checkpoint_of(reference: Any) -> dict[str, torch.Tensor]:
    """The weights under the names that files have, with the experts apart."""
    weights = {}
    for name, weight in reference.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(weight) if prefix.endswith(".experts") else ():
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for each, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                weights[f"{prefix}.{expert}.{each}.weight"] = part
        if not prefix.endswith(".experts"):
            weights[name] = weight
    return weights


def make_twins(
    kind: str, dtype: torch.dtype = torch.float32, ops: Ops | None = None, **changes: Any
) -> Twins:
    reference = make_reference(kind, **changes)
    # Through JSON, as the engine will meet it.
    config = ModelConfig.from_hf(
        {**json.loads(reference.config.to_json_string()), "architectures": [type(reference).__name__]}
    )
    ops = ops or TorchOps(CPU, dtype)
    model = DecoderModel(
        config,
        pack_weights(config, checkpoint_of(reference), ops, CPU, dtype),
        ops,
        device=CPU,
        dtype=dtype,
    )
    return Twins(reference, config, model)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


class BlockDealer:
    """Hands out blocks in a scattered order, so that no test passes because blocks lie in a row."""

    def __init__(self, num_blocks: int = 200) -> None:
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self._free = order.tolist()

    def sequence(self, prompt: Items[int], max_tokens: int, **sampling: Any) -> Sequence:
        num_blocks = -(-(len(prompt) + max_tokens) // BLOCK_SIZE)
        return Sequence(
            seq_id=SequenceId(f"s{len(self._free)}"),
            sampling=SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            block_table=[BlockId(self._free.pop()) for _ in range(num_blocks)],
        )


def run_step(runner: ModelRunner, parts: Items[tuple[Sequence, int]]) -> list[Token | None]:
    """Execute one step and apply it, as the scheduler would."""
    all_decode = all(count == 1 and sequence.num_output_tokens for sequence, count in parts)
    plan = StepPlan(
        [Slice(*part) for part in parts],
        sum(count for _, count in parts),
        num_decodes=len(parts) if all_decode else 0,
    )
    tokens = list(runner.execute(plan).tokens)
    for (sequence, count), token in zip(parts, tokens, strict=True):
        sequence.num_computed += count
        if token is not None:
            sequence.token_ids.append(token.token_id)
    return tokens


def generate(
    runner: ModelRunner, sequences: Items[Sequence], chunk_size: int = 1 << 30
) -> list[list[Token]]:
    """All sequences to their `max_tokens`, together, with prompts cut into chunks."""
    tokens: list[list[Token]] = [[] for _ in sequences]
    while True:
        parts = [
            (i, s, min(s.num_pending, chunk_size))
            for i, s in enumerate(sequences)
            if s.num_output_tokens < s.sampling.max_tokens
        ]
        if not parts:
            return tokens
        for (i, *_), token in zip(parts, run_step(runner, [p[1:] for p in parts]), strict=True):
            if token is not None:
                tokens[i].append(token)


def reference_greedy(reference: Any, prompt: list[int], max_tokens: int) -> list[int]:
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()
