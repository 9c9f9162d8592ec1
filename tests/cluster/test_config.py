"""What is wrong in a configuration is told in its own words; what can be in it has a meaning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from cluster.config import ClusterConfig, load_config
from cluster.config_errors import key_paths
from cluster.config_reference import Key, as_markdown, as_yaml, keys_of
from protocol.errors import StartupError

ROOT = Path(__file__).resolve().parent.parent.parent


def problem(text: str, folder: Path, **overrides: object) -> str:
    file = folder / "my.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(StartupError) as caught:
        load_config(file, {key.replace("__", "."): value for key, value in overrides.items()})
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("decode: {num_wrokers: 2}", "decode.num_wrokers: unknown key; did you mean decode.num_workers?"),
        ("decode: {xyzzy: 2}", "decode.xyzzy: unknown key"),
        ("num_workers: 2", "unknown key; did you mean prefill.num_workers or decode.num_workers?"),
        ("decode: 5", "decode: must be a section of keys, not 5"),
        ("decode: {swap_memory: a lot}", "must be a number of bytes such as 512MiB or 4GiB, not 'a lot'"),
        ("decode: {threads: many}", "decode.threads: must be an integer or 'auto', not 'many'"),
        ("dtype: float16", "dtype: must be 'auto', 'float32' or 'bfloat16', not 'float16'"),
        ("decode: {resources: {GPU: 1}}", "must be custom resources, not GPU: use num_gpus"),
        ("decode: {resources: {decode_host: -1}}", "must be amounts of 0 or more, not -1 of decode_host"),
        ('router: {resources: {"a\'b": 1}}', "must be names of letters"),
        ("http: {port: -1}", "http.port: must be greater than or equal to 0, not -1"),
    ],
)
def test_a_bad_key_is_told_with_its_file_and_without_our_words(
    text: str, line: str, tmp_path: Path
) -> None:
    message = problem(text, tmp_path)
    assert line in message
    assert f"(in {tmp_path / 'my.yaml'})" in message
    assert len(message.splitlines()) == 2
    assert not any(word in message for word in ("Config", "Value error", "(top)", "Input"))


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    lines = problem("block_size: 7", tmp_path, decode__max_num_seqs=0).splitlines()
    assert [line.rpartition("(")[2] for line in lines[1:]] == [
        f"in {tmp_path / 'my.yaml'})",
        "on the command line)",
    ]


def test_values_that_come_from_elsewhere_are_said_to() -> None:
    with pytest.raises(StartupError, match=r"decode.num_worker: unknown key.*\(in the arguments\)"):
        load_config(None, {"decode": {"num_worker": 1}}, "in the arguments")


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("decode:\nhttp:\n", encoding="utf-8")
    assert load_config(file) == ClusterConfig()
    assert load_config(file, {"decode.num_workers": 2}).decode.num_workers == 2


def test_the_largest_n_follows_the_batch_unless_it_is_set(tmp_path: Path) -> None:
    """Regression: `--set decode.max_num_seqs=8` was refused for the default of another key."""
    assert ClusterConfig().max_num_choices == 16
    assert load_config(None, {"decode.max_num_seqs": 8}).max_num_choices == 8
    message = problem("router: {max_num_choices: 9}", tmp_path, decode__max_num_seqs=8)
    assert "router.max_num_choices is 9, but decode.max_num_seqs is 8" in message


def all_keys(section: BaseModel) -> Iterator[Key]:
    yield from keys_of(section)
    for name in type(section).model_fields:
        if isinstance(inner := getattr(section, name), BaseModel):
            yield from all_keys(inner)


def test_every_key_has_a_meaning() -> None:
    keys = list(all_keys(ClusterConfig()))
    assert len(keys) == len(list(key_paths(ClusterConfig)))
    assert [key.name for key in keys if not key.meaning or not key.type] == []


@pytest.mark.parametrize("overrides", [{}, {"decode.kv_cache_memory": 12345, "http.api_key_file": "k"}])
def test_the_printed_configuration_is_one_that_says_the_same(
    overrides: dict[str, object], tmp_path: Path
) -> None:
    config = load_config(None, overrides)
    file = tmp_path / "printed.yaml"
    file.write_text(as_yaml(config), encoding="utf-8")
    assert load_config(file) == config


def test_the_page_about_the_configuration_is_up_to_date() -> None:
    page = ROOT / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == as_markdown(), "run .venv/bin/python scripts/config_page"
    check = [sys.executable, str(ROOT / "scripts" / "config_page"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0
