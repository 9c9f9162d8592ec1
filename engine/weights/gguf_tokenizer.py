"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json.

Text is split before the merges as the model's own tokenizer does, by the name in
`tokenizer.ggml.pre`; a name that is not known is refused, since a wrong split gives wrong tokens
without any other sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.weights.gguf_file import GgufFile
from protocol.errors import StartupError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How one family of byte-level tokenizers prepares text."""

    split: str | None = None
    """A regular expression; None is GPT-2's."""
    single_digits: bool = False
    """Cut every digit off before the split."""
    nfc: bool = False
    whole_words_first: bool = False
    """A piece that is a token as it stands is not merged from its letters."""
    add_bos: bool = False
    """What holds when the file does not say."""


_GPT2 = _Scheme()
_LLAMA3 = _Scheme(_LLAMA3_SPLIT, whole_words_first=True, add_bos=True)
_DIGITS = _Scheme(single_digits=True)
_SCHEMES = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _Scheme(_LLAMA3_SPLIT),
    "tekken": _Scheme(_TEKKEN_SPLIT, whole_words_first=True, add_bos=True),
    "qwen2": _Scheme(_QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": _Scheme(_QWEN2_SPLIT),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
}


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer, as `tokenizers` saves it. Raises `StartupError` for a kind that is not known."""
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(gguf, _scheme(gguf))
    elif kind == "llama":
        tokenizer = _sentencepiece(gguf)
    else:
        raise StartupError(f"{gguf.path} has a tokenizer of kind {kind!r}; supported: gpt2, llama")
    _add_special_tokens(tokenizer, gguf)
    _add_post_processor(tokenizer, gguf)
    return tokenizer


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    config: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.count("context_length"),
        "add_bos_token": _adds_bos(gguf),
        "add_eos_token": bool(gguf.metadata.get("tokenizer.ggml.add_eos_token", False)),
        **_named_tokens(gguf),
    }
    if template := gguf.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _tokens(gguf: GgufFile) -> list[str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise StartupError(f"{gguf.path} has no vocabulary: get another file")
    return [str(token) for token in tokens]


def _per_token(gguf: GgufFile, key: str, num_tokens: int) -> list[Any]:
    """A list with one entry per token; zeros when the file has none."""
    found = gguf.metadata.get(f"tokenizer.ggml.{key}", [0] * num_tokens)
    if not isinstance(found, list) or len(found) != num_tokens:
        raise StartupError(f"{gguf.path}: tokenizer.ggml.{key} has no entry per token: get another file")
    return found


def _scheme(gguf: GgufFile) -> _Scheme:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SCHEMES:
        raise StartupError(
            f"{gguf.path} splits text by {name!r}, which is not known: pass the model as a Hugging Face "
            f"folder. Known: {', '.join(sorted(_SCHEMES))}"
        )
    return _SCHEMES[name]


def _adds_bos(gguf: GgufFile) -> bool:
    said = gguf.metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return gguf.metadata.get("tokenizer.ggml.model") == "llama" or _scheme(gguf).add_bos


def _named_tokens(gguf: GgufFile) -> dict[str, str]:
    """bos_token and its like, as text; those that the file does not name are left out."""
    tokens = _tokens(gguf)
    found = {
        name: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()
    }
    for name, token_id in found.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise StartupError(
                f"{gguf.path}: {name} is {token_id} of {len(tokens)} tokens: get another file"
            )
    return {name: tokens[token_id] for name, token_id in found.items() if token_id is not None}


def _byte_level(gguf: GgufFile, scheme: _Scheme) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {token: token_id for token_id, token in enumerate(_tokens(gguf))}
    merges = _stated_merges(gguf, vocab)
    if merges is None:
        raise StartupError(f"{gguf.path} has a vocabulary without merges: get another file")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=scheme.whole_words_first))
    steps: list[Any] = []
    if scheme.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if scheme.split is not None:
        steps.append(pre_tokenizers.Split(Regex(scheme.split), behavior="isolated"))
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=scheme.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens = _tokens(gguf)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _stated_merges(gguf, vocab)
    if merges is None:
        scores = _per_token(gguf, "scores", len(tokens))
        merges = _implied_merges(vocab, dict(zip(tokens, scores, strict=True)))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _stated_merges(gguf: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]] | None:
    stated = gguf.metadata.get("tokenizer.ggml.merges")
    if stated is None:
        return None
    merges: list[tuple[str, str]] = []
    for merge in stated:
        left, _, right = str(merge).partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise StartupError(
                f"{gguf.path} has a merge of what are no tokens ({merge!r}): get another file"
            )
        merges.append((left, right))
    return merges


def _implied_merges(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: what sentencepiece's search does."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        made = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        made.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(score, len(left), len(right), left, right) for left, right in made]
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """Tokens that are matched whole in any text: control tokens (not shown) and user-defined ones."""
    from tokenizers import AddedToken

    tokens = _tokens(gguf)
    kinds = _per_token(gguf, "token_type", len(tokens))
    named = set(_named_tokens(gguf).values())
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL or t in named]
    plain = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED and t not in named]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _add_post_processor(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """Begin and end tokens around the text, where the file asks for them."""
    from tokenizers.processors import TemplateProcessing

    config = tokenizer_config(gguf)
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    single = " ".join(part for part in (bos, "$A", eos) if part)
    pair = " ".join(
        part
        for part in (bos, "$A", eos, f"{bos}:1" if bos else "", "$B:1", f"{eos}:1" if eos else "")
        if part
    )
    around = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=around)
