"""Models of real sizes with random weights, and sequences for them, on the device that is to be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.captured_decoding import Capture
from engine.kv_cache import KvCache
from engine.model import DecoderModel, ModelConfig
from engine.model.weights import pack_weights
from engine.ops import Ops
from engine.plan import Slice, StepPlan
from engine.runner import ModelRunner
from engine.sequence import Sequence
from protocol.generation import SamplingParams, Token
from protocol.ids import BlockId, SequenceId

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SMOLLM2 = LLAMA_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


class RandomCheckpoint(Mapping[str, torch.Tensor]):
    """Tensors under Hugging Face's names, made when they are asked for, the same ones each time."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (config.vocab_size, hidden),
        }
        for index in range(config.num_layers):
            layer = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (query_size, hidden),
                "self_attn.k_proj": (kv_size, hidden),
                "self_attn.v_proj": (kv_size, hidden),
                "self_attn.o_proj": (hidden, query_size),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            self._shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        self._seeds = {name: seed for seed, name in enumerate(self._shapes)}

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        return weight.normal_(0, shape[1] ** -0.5, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def make_model(
    description: Mapping[str, object], ops: Ops, device: torch.device, dtype: torch.dtype
) -> DecoderModel:
    config = ModelConfig.from_hf(description)
    weights = pack_weights(config, RandomCheckpoint(config, device, dtype), ops, device, dtype)
    length = min(MAX_MODEL_LEN, config.max_model_len)
    return DecoderModel(config, weights, ops, device=device, dtype=dtype, max_model_len=length)


def num_weight_bytes(model: DecoderModel) -> int:
    """What a decode step reads of the model: all but the embedding, of which it takes a few rows."""
    layers = [
        part.weight if hasattr(part, "weight") else part
        for layer in model._weights.layers
        for part in (
            *(layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down),
            *(layer.input_norm, layer.mlp_norm),
        )
    ]
    return sum(each.nbytes for each in layers) + model._weights.head.weight.nbytes


@dataclass
class Batch:
    """Sequences of one length, with blocks of their own, and a runner for them."""

    runner: ModelRunner
    sequences: list[Sequence]

    @classmethod
    def create(
        cls,
        model: DecoderModel,
        count: int,
        num_tokens: int,
        max_tokens: int,
        capture: Capture | None = None,
    ) -> Batch:
        num_blocks = -(-(num_tokens + max_tokens) // BLOCK_SIZE)
        kv_cache = KvCache(
            model.config,
            num_blocks=count * num_blocks + 1,
            block_size=BLOCK_SIZE,
            dtype=model.dtype,
            device=model.device,
        )
        order = (
            torch.randperm(count * num_blocks, generator=torch.Generator().manual_seed(1)) + 1
        ).tolist()
        sequences = []
        for index in range(count):
            generator = torch.Generator().manual_seed(index)
            prompt = torch.randint(3, model.config.vocab_size, (num_tokens,), generator=generator).tolist()
            blocks = order[index * num_blocks : (index + 1) * num_blocks]
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            sequences.append(
                Sequence(
                    seq_id=SequenceId(f"s{index}"),
                    sampling=sampling,
                    token_ids=prompt,
                    num_prompt_tokens=num_tokens,
                    block_table=[BlockId(block) for block in blocks],
                )
            )
        runner = ModelRunner(model, kv_cache, (), capture=capture, max_sequences=count)
        return cls(runner, sequences)

    def prefill(self, tokens_per_step: int = 8192) -> None:
        for sequence in self.sequences:
            while sequence.num_pending:
                self._step([(sequence, min(sequence.num_pending, tokens_per_step))])
                if sequence.num_output_tokens:
                    break

    def pretend_prefilled(self) -> None:
        """Blocks full of zeros, for when only time is of interest."""
        for sequence in self.sequences:
            sequence.num_computed = sequence.num_prompt_tokens - 1

    def decode(self) -> None:
        self._step([(sequence, 1) for sequence in self.sequences])

    def output_tokens(self) -> list[list[int]]:
        return [each.token_ids[each.num_prompt_tokens :] for each in self.sequences]

    def _step(self, parts: list[tuple[Sequence, int]]) -> None:
        decodes = sum(count == 1 for _, count in parts)
        num_tokens = sum(count for _, count in parts)
        plan = StepPlan([Slice(*part) for part in parts], num_tokens, num_decodes=decodes)
        tokens = self.runner.execute(plan).tokens
        for (sequence, count), token in zip(parts, tokens, strict=True):
            sequence.num_computed += count
            if isinstance(token, Token):
                sequence.token_ids.append(token.token_id)
