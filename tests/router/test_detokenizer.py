"""Incremental text is the text of all tokens: no parts of characters, no parts of stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_kit import byte_fallback_backend, byte_level_backend

from router import Tokenizer
from router.detokenizer import MAX_HELD_TOKENS, Detokenizer, StopMatcher

BYTE_LEVEL = Tokenizer(byte_level_backend())
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
WORDS = st.text(alphabet="helo w.\u00e9\u4f60\U0001f642\u0301", min_size=1, max_size=20)


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=MAX_HELD_TOKENS))
def test_random_byte_level_tokens_give_the_full_decode(token_ids: list[int]) -> None:
    """Broken UTF-8, special tokens and ids that the tokenizer does not know included."""
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@TOKENIZERS
@given(text=WORDS)
def test_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    given_out = pieces(tokenizer, token_ids)
    assert "".join(given_out) == tokenizer.decode(token_ids)
    assert all("\ufffd" not in piece for piece in given_out)


@given(st.lists(st.integers(0, BYTE_FALLBACK.vocab_size + 3), max_size=40))
def test_random_byte_fallback_tokens_lose_no_readable_text(token_ids: list[int]) -> None:
    """In this family one bad byte makes a run of bytes unreadable after the fact, so that the full
    decode is no oracle for the bytes; the text between them is."""
    text = "".join(pieces(BYTE_FALLBACK, token_ids))
    readable = [t for t in token_ids if 258 < t < BYTE_FALLBACK.vocab_size]
    expected = BYTE_FALLBACK.decode(readable).replace(" ", "")
    known = [c for c in text if c in "abcdefghijklmnopqrstuvwxyz"]
    assert len(known) >= len([c for c in expected if c in "abcdefghijklmnopqrstuvwxyz"])


@TOKENIZERS
def test_unfinished_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("ok \U0001f642", add_special_tokens=False)[:-1]
    given_out = pieces(tokenizer, token_ids)
    assert "".join(given_out[:-1]) == tokenizer.decode(tokenizer.encode("ok ", add_special_tokens=False))
    assert set(given_out[-1]) == {"\ufffd"}


def test_endless_garbage_is_given_out_in_bounded_time() -> None:
    """Regression: with one byte forced by logit_bias, the work per token grew without bound."""
    continuation_byte = BYTE_LEVEL.encode("\u00e9", add_special_tokens=False)[-1]
    detokenizer = Detokenizer(BYTE_LEVEL)
    texts = [detokenizer.push(continuation_byte) for _ in range(3 * MAX_HELD_TOKENS)]
    assert sum(len(text) for text in texts) > 2 * MAX_HELD_TOKENS


def reference_cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_are_cut_however_the_text_is_split(splits: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    out = ""
    for split in splits:
        out += matcher.push(split)
        assert not any(s in out for s in stop)
    was_matched = matcher.is_matched
    out += matcher.flush()
    assert (out, was_matched) == reference_cut("".join(splits), stop)


@given(
    st.lists(st.tuples(st.text(alphabet="ab", max_size=3), st.booleans()), max_size=10),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_may_begin_but_not_end_where_none_may_end(
    splits: list[tuple[str, bool]], stop: list[str]
) -> None:
    """Regression: with `min_tokens`, one that began among the first tokens was never found."""
    matcher = StopMatcher(stop)
    out, text, expected = "", "", None
    for split, may_end in splits:
        for end in range(len(text) + 1, len(text) + len(split) + 1):
            ending = [s for s in stop if (text + split)[:end].endswith(s)]
            if ending and may_end and expected is None:
                expected = (text + split)[: end - max(map(len, ending))]
        text += split
        out += matcher.push(split, may_end)
    was_matched = matcher.is_matched
    out += matcher.flush()
    assert was_matched == (expected is not None)
    assert len(out) <= len(text)
    assert out == text if expected is None else text.startswith(out) and len(out) >= len(expected)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("hello\n") == "hello"
    assert matcher.push("\nUs") == ""
    assert matcher.push("ual") == "\n\nUsual"
    assert matcher.push("\n\nUser: no") == ""
    assert matcher.is_matched
