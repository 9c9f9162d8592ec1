"""A model is looked at without being converted, downloaded or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from weights_samples import tensors_of, trained_tokenizer, write_folder, write_gguf

from engine.weights import ModelState, resolve_model, survey_model
from protocol.errors import StartupError


def test_a_folder_is_ready_under_its_own_revision(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    found = survey_model(str(folder), cache_dir=tmp_path / "cache")
    assert found.state is ModelState.READY
    assert found.revision == resolve_model(str(folder), cache_dir=tmp_path / "cache").revision
    assert found.num_parameters == sum(tensor.numel() for tensor in tensors_of("llama").values())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        survey_model(str(write_folder(tmp_path / "m")), cache_dir=tmp_path)


def test_what_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no model at"):
        survey_model(str(tmp_path / "nowhere"), cache_dir=tmp_path)


def test_a_gguf_file_is_to_convert_until_it_has_been(tmp_path: Path) -> None:
    gguf, cache_dir = write_gguf(tmp_path / "m.gguf", "llama", tensors_of("llama")), tmp_path / "cache"
    before = survey_model(str(gguf), cache_dir=cache_dir)
    assert (before.state, before.path) == (ModelState.TO_CONVERT, str(gguf))
    assert not cache_dir.exists()
    folder = resolve_model(str(gguf), cache_dir=cache_dir)
    after = survey_model(str(gguf), cache_dir=cache_dir)
    assert (after.state, after.path) == (ModelState.READY, str(folder.path))
    assert after.num_parameters == before.num_parameters
