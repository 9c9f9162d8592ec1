"""The tokenizer of a GGUF file: the ids that the model was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer
from weights_samples import SPECIAL, TEXTS, tensors_of, trained_tokenizer, write_gguf

from engine.weights import ModelFolder, demo_model_path, resolve_model
from protocol.errors import StartupError


def convert(gguf: Path) -> ModelFolder:
    return resolve_model(str(gguf), cache_dir=gguf.parent / "cache")


def tokenizer_of(gguf: Path) -> Tokenizer:
    return Tokenizer.from_file(str(convert(gguf).tokenizer_path))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text).ids
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokenizer_gives_the_sources_ids_and_text_back(tmp_path: Path, text: str) -> None:
    converted = tokenizer_of(write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama")))
    assert ids(converted, text) == ids(trained_tokenizer(), text)
    assert converted.decode(ids(converted, text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("arch", "pre"), [("llama", "gpt-2"), ("llama", "llama-bpe"), ("qwen2", "qwen2"), ("qwen3", "qwen2")]
)
def test_ids_are_those_of_transformers(tmp_path: Path, arch: str, pre: str) -> None:
    """Both its own reading of the GGUF, and what it makes of the converted folder."""
    from transformers import AutoTokenizer

    gguf = write_gguf(
        tmp_path / "m.gguf",
        arch,
        tensors_of(arch),
        pre=pre,
        more=lambda w: w.add_add_bos_token(pre == "llama-bpe"),
    )
    converted = tokenizer_of(gguf)
    from_gguf = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    from_folder = AutoTokenizer.from_pretrained(convert(gguf).path)
    for text in TEXTS:
        assert ids(converted, text) == from_gguf.encode(text) == from_folder.encode(text), text
    assert (from_folder.bos_token, from_folder.eos_token) == (from_gguf.bos_token, from_gguf.eos_token)
    assert from_folder.chat_template == from_gguf.chat_template


def test_bos_is_added_when_the_file_asks_for_it(tmp_path: Path) -> None:
    gguf = write_gguf(
        tmp_path / "m.gguf", "llama", tensors_of("llama"), more=lambda w: w.add_add_bos_token(True)
    )
    tokenizer = tokenizer_of(gguf)
    assert ids(tokenizer, "hi")[0] == SPECIAL.index("<|im_start|>")
    assert ids(tokenizer, "hi")[1:] == tokenizer.encode("hi", add_special_tokens=False).ids


def test_digits_stay_apart_from_spaces_where_the_model_was_trained_so(tmp_path: Path) -> None:
    """A GPT-2 split would give the last of two spaces to the digit; SmolLM2's never does."""
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"), pre="smollm"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a  42")]
    assert pieces == ["a", "ĠĠ", "4", "2"]


def test_user_defined_tokens_stay_whole_and_are_shown(tmp_path: Path) -> None:
    def retyped(writer: GGUFWriter) -> None:
        tokens = ["<unk>", "<s>", "</s>", "<think>", "<", "t", "h", "i", "n", "k", ">", "▁"]
        write_sentencepiece(writer, tokens, kinds=[2, 3, 3, 4] + [1] * 8)

    tokenizer = tokenizer_of(
        write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"), vocabulary=retyped)
    )
    assert ids(tokenizer, "<think>")[-1] == 3
    assert tokenizer.decode([3]) == "<think>"


def write_sentencepiece(writer: GGUFWriter, tokens: list[str], kinds: list[int]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_sentencepiece_vocabulary_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "llo",
        "hello",
        "▁w",
        "or",
        "▁wor",
        "▁world",
        "▁hello",
    ]

    def sentencepiece(writer: GGUFWriter) -> None:
        tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words]
        write_sentencepiece(writer, tokens, [2, 3, 3] + [6] * 256 + [1] * len(words))

    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"), vocabulary=sentencepiece)
    converted, reference = tokenizer_of(gguf), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("hello world", "  hello\nworld", "<s>hello</s>", "héllo 世界 👋"):
        assert ids(converted, text) == reference.encode(text), text
        assert converted.decode(ids(converted, text)) == reference.decode(
            reference.encode(text), skip_special_tokens=True
        )


@pytest.mark.parametrize(("pre", "model"), [("unheard-of", "gpt2"), ("gpt-2", "bert")])
def test_tokenizer_that_is_not_known_is_refused(tmp_path: Path, pre: str, model: str) -> None:
    def vocabulary(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a"])
        writer.add_token_merges([])

    gguf = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama"), vocabulary=vocabulary)
    with pytest.raises(StartupError, match=pre if model == "gpt2" else model):
        convert(gguf)


@pytest.mark.model
def test_demo_models_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """But for digits after several spaces, where transformers has GPT-2's split instead of the model's."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    gguf = demo_model_path()
    folder = resolve_model(str(gguf), cache_dir=tmp_path)
    arch, vocabulary, config = get_gguf_tokenizer(str(gguf))
    reference, _ = convert_gguf_tokenizer(arch, vocabulary)
    converted = Tokenizer.from_file(str(folder.tokenizer_path))
    for text in TEXTS:
        assert ids(converted, text) == ids(reference, text), text
    tokenizer_config = json.loads((folder.path / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == config["chat_template"]
