"""Loading a model folder, rendering chats as transformers does, and the bytes of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from router_kit import CHATML, byte_fallback_backend, byte_level_backend

from protocol.errors import InvalidRequest, StartupError
from router import Tokenizer, load_tokenizer
from router.chat_template import ChatTemplate

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(count=0, last={}) %}
{% for message in loop_messages %}
    {% if message['content'] == 'skip' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message['role'] == 'assistant' %}
        {% generation %}[{{ message['content'] }}]{{ eos_token }}{% endgeneration %}
    {% else %}
  <{{ message.role }}>{{ message | tojson }}{{ {"a<b": [1, "\u00e9"]} | tojson(indent=2) }}
    {% endif %}
{% endfor %}
{{ ns.count }} {{ system }} {{ dict(a=1) }} {{ thinking }}
{% if add_generation_prompt %}<assistant>{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "  be <kind> & 'good' "},
    {"role": "user", "content": "h\u00e9llo\n"},
    {"role": "assistant", "content": "skip"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
]
CONFIG = {
    "bos_token": {"__type": "AddedToken", "content": "<|bos|>", "special": True},
    "eos_token": "<|eos|>",
    "pad_token": None,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def model_folder(folder: Path, **files: Any) -> Path:
    byte_level_backend().save(str(folder / "tokenizer.json"))
    for name, content in ({"tokenizer_config": CONFIG} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def encoded_chat(tokenizer: Tokenizer, variables: dict[str, Any] | None = None) -> tuple[int, ...]:
    return tokenizer.encode(tokenizer.render_chat(MESSAGES, variables), add_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE])
def test_chat_equals_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = model_folder(tmp_path, tokenizer_config=CONFIG | {"chat_template": template})
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False, thinking=True
    )
    ours = encoded_chat(load_tokenizer(folder), {"thinking": True})
    assert list(ours) == expected
    assert ours.count(oracle.bos_token_id) == template.count("bos_token")


def test_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, tokenizer_config=CONFIG | {"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    tokenizer = load_tokenizer(folder)
    assert encoded_chat(tokenizer) == tokenizer.encode("new", add_special_tokens=False)


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    tokenizer = load_tokenizer(model_folder(tmp_path, tokenizer_config={"chat_template": named}))
    assert encoded_chat(tokenizer) == tokenizer.encode("d", add_special_tokens=False)


def test_model_without_template_refuses_chat(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_tokenizer(model_folder(tmp_path)).render_chat(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[99].content.upper() }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set _ = messages.append(1) %}{{ messages.append(1) }}",
        "{{ dict.fromkeys(1) }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_template_failures_are_the_request_s_fault(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_templates_know_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2031, 2, 3))
    assert template.render(MESSAGES) == "03 Feb 2031"


def test_broken_template_stops_the_start() -> None:
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_missing_or_broken_files_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("config", [{"vocab_size": 1000}, {"text_config": {"vocab_size": 1000}}])
def test_vocabulary_is_the_model_s_when_it_says_so(tmp_path: Path, config: dict[str, Any]) -> None:
    assert load_tokenizer(model_folder(tmp_path, config=config)).vocab_size == 1000


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend).encode("abcdef", add_special_tokens=False)) == 6


@pytest.mark.parametrize(
    "backend", [byte_level_backend(), byte_fallback_backend()], ids=["level", "fallback"]
)
def test_bytes_of_tokens_make_up_the_text(backend: Any) -> None:
    tokenizer = Tokenizer(backend)
    text = "hello w\u00f6rld \U0001f642"
    raw = b"".join(tokenizer.token_bytes(t) for t in tokenizer.encode(text, add_special_tokens=False))
    assert raw.decode().lstrip() == text
    special = max(backend.get_added_tokens_decoder())
    assert tokenizer.token_bytes(special).decode() == backend.id_to_token(special)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 9) == b""


def test_tokenising_needs_neither_torch_nor_transformers() -> None:
    """Start-up budget: these imports cost seconds."""
    code = (
        "import sys, router, router.app, router.tokenizer;"
        "print([m for m in ('torch', 'transformers', 'ray', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("backend", [byte_level_backend(), byte_fallback_backend()])
def test_long_texts_have_the_tokens_of_the_plain_encoder(backend: Any) -> None:
    text = "hello w\u00e9 worlds, all of them " * 1000
    for adds_special in (False, True):
        expected = backend.encode(text, add_special_tokens=adds_special).ids
        assert list(Tokenizer(backend).encode(text, adds_special)) == expected
