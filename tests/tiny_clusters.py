"""Whole clusters on tiny random models, for tests that need all parts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from compiled_ops import cache_folder
from tiny_models import VOCAB_SIZE, make_reference

from cluster.config import ClusterConfig, load_config

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def tiny_model(kind: str, folder: Path, **changes: Any) -> Path:
    """Write one of `tiny_models.KINDS`, with `changes` to its config, as a complete Hugging Face folder
    and return it."""
    target = folder / kind
    make_reference(kind, **changes).save_pretrained(target)
    _tokenizer().save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return target


def tiny_config(model: Path, **changes: Any) -> ClusterConfig:
    """One prefill and one decode worker over NIXL, with small pools; `changes` are dotted paths."""
    defaults: dict[str, object] = {
        "model": str(model),
        "served_model_name": "tiny",
        "dtype": "float32",
        "cache_dir": str(cache_folder(model.parent)),
        "http.port": 0,
        "prefill.num_blocks": 200,
        "decode.num_blocks": 200,
        "prefill.max_num_batched_tokens": 128,
        "decode.max_num_batched_tokens": 128,
        "prefill.threads": 1,
        "decode.threads": 1,
    }
    return load_config(
        None, {**defaults, **{key.replace("__", "."): value for key, value in changes.items()}}
    )


def _tokenizer() -> tokenizers.Tokenizer:
    """Byte-level: every byte is a token of its own, from id 3 on."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{char: i + 3 for i, char in enumerate(alphabet)}}
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer
