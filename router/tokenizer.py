"""Text to tokens and back, with the files of a model folder. Thread-safe: nothing changes after loading."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from protocol.errors import InvalidRequest, StartupError
from router.chat_template import ChatTemplate, Message

LONG_TEXT_CHARACTERS = 8192
"""Longer texts are to be tokenised in a thread, so that nobody's stream waits for that."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A model's tokenizer, chat template and vocabulary size."""

    def __init__(
        self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None, vocab_size: int = 0
    ) -> None:
        """`vocab_size`: the model's when it is known, else the tokenizer's."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        """Characters of text that one token can stand for, at most."""
        self._template = template
        self._bytes_of_char = _byte_level_chars() if _is_byte_level(backend) else {}
        self._added_ids = frozenset(backend.get_added_tokens_decoder())

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`. May take long for a long text, and lets other threads run meanwhile."""
        if len(text) <= LONG_TEXT_CHARACTERS:
            return tuple(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # The library gives the interpreter's lock up only for batches.
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that spell a word: at the beginning of a text, and after a space.

        Both are banned wherever they differ; vLLM bans the second one only when it is as long as the first.
        """
        word = word.lstrip()
        spelled = (self.encode(word, False), self.encode(" " + word, False))
        return list(dict.fromkeys(ids for ids in spelled if ids))

    def render_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The chat as the text to encode, with no special tokens but those that the template writes.

        Raises `InvalidRequest` when there is no template or it cannot render the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self._template.render(messages, variables)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output, special tokens left out."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for by itself; its name for a special token."""
        token: str = self.backend.id_to_token(token_id) or ""
        if token_id in self._added_ids:
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if self._bytes_of_char:
            return bytes(self._bytes_of_char[char] for char in token if char in self._bytes_of_char)
        return token.replace("\u2581", " ").encode()  # sentencepiece's sign for a space


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder in Hugging Face's layout.

    Raises `StartupError` when `tokenizer.json` is missing or a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"{path} is missing: the router needs a tokenizer in Hugging Face's fast format")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise StartupError(f"{path} cannot be read: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    template = ChatTemplate(source, special_tokens) if source else None
    return Tokenizer(backend, template, _model_vocab_size(_read_json(folder / "config.json")))


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} does not hold a JSON object")
    return content


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: a file of its own wins over the one in the configuration."""
    for name in ("chat_template.jinja", "chat_template.json"):
        path = folder / name
        if path.is_file() and path.suffix == ".jinja":
            return path.read_text(encoding="utf-8")
        if path.is_file():
            return _as_source(_read_json(path).get("chat_template"))
    return _as_source(config.get("chat_template"))


def _as_source(value: Any) -> str | None:
    if isinstance(value, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by the names under which templates know them."""
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _model_vocab_size(config: Mapping[str, Any]) -> int:
    """Rows of the model's embedding; 0 when the folder does not say."""
    text_config = config.get("text_config")
    nested = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    size = config.get("vocab_size", nested)
    return size if isinstance(size, int) else 0


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))


def _byte_level_chars() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable Latin-1 stands for itself,
    all others for 256 and up in order (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
