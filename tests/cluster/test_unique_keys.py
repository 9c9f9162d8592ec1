"""A key that stands twice is an error, not a value that is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import load_config
from cluster.unique_keys import load_yaml
from protocol.errors import StartupError


@pytest.mark.parametrize(
    "text",
    ["model: a\nmodel: b\n", "decode: {num_workers: 2}\nmodel: a\ndecode: {max_num_seqs: 8}\n"],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "splitserve.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StartupError, match="a second time"):
        load_config(path)


def test_the_same_key_in_different_sections_and_in_what_is_merged_in_is_fine() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n"
    assert load_yaml(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}
