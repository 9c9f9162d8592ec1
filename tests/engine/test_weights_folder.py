"""Model folders: what is accepted, what is refused with which words, and how weights are loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights_samples import SPECIAL, shard_folder, tensors_of, trained_tokenizer, write_folder

from engine.weights import ModelFolder, load_weights, resolve_model
from protocol.errors import StartupError


def resolve(path: Path | str) -> ModelFolder:
    return resolve_model(str(path), cache_dir=Path(path).parent / "cache")


def test_single_file_folder_loads_bit_exactly(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    folder = resolve(write_folder(tmp_path / "tiny", tensors))
    loaded = load_weights(folder, torch.float32)
    assert folder.name == "tiny"
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_sharded_folder_loads_the_same_weights_under_the_same_revision(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    single = resolve(write_folder(tmp_path / "single", tensors))
    sharded = resolve(shard_folder(tmp_path / "sharded", tensors))
    loaded = load_weights(sharded, torch.float32)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert sharded.revision == single.revision


def test_numbered_shards_need_no_index(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path / "m", tensors_of("llama"))
    (folder / "model.safetensors.index.json").unlink()
    assert load_weights(resolve(folder), torch.float32).keys() == tensors_of("llama").keys()


def test_weights_are_cast_to_the_wanted_type(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    loaded = load_weights(resolve(write_folder(tmp_path / "m", tensors)), torch.bfloat16)
    assert all(torch.equal(loaded[name], tensors[name].bfloat16()) for name in tensors)


def test_same_type_is_mapped_not_copied(tmp_path: Path) -> None:
    """All tensors of a shard must lie as far apart in memory as they do in the file."""
    loaded = load_weights(resolve(write_folder(tmp_path / "m")), torch.float32)
    begins = [tensor.data_ptr() for tensor in loaded.values()]
    assert max(begins) - min(begins) < sum(tensor.nbytes for tensor in loaded.values())


def test_tied_output_projection_and_derived_buffers_are_left_out(tmp_path: Path) -> None:
    tensors = tensors_of("llama", tied=False)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    tied = resolve(write_folder(tmp_path / "tied", tensors, tie_word_embeddings=True))
    untied = resolve(write_folder(tmp_path / "untied", tensors, tie_word_embeddings=False))
    assert load_weights(tied, torch.float32).keys() == tensors_of("llama").keys()
    assert load_weights(untied, torch.float32).keys() == tensors_of("llama", tied=False).keys()


def test_revision_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", _name_or_path="here")
    second = write_folder(tmp_path / "b", _name_or_path="there")
    other_weights = write_folder(tmp_path / "c", tensors_of("llama", seed=1))
    other_config = write_folder(tmp_path / "d", rope_theta=5.0)
    revisions = [resolve(folder).revision for folder in (first, second, other_weights, other_config)]
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 3


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [({"eos_token_id": [7, 8]}, 1, (7, 8)), ({"eos_token_id": 7}, 1, (7,)), ({}, 1, (1,)), ({}, None, ())],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, object], config: int | None, ends: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path / "m", eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert resolve(folder).eos_token_ids == ends


def test_tokenizer_is_asked_for_only_by_who_needs_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        _ = resolve(folder).tokenizer_path
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    assert SPECIAL[0] in resolve(folder).tokenizer_path.read_text()


def refused(path: Path | str, *words: str) -> None:
    """Resolving must fail with all the words in its message."""
    with pytest.raises(StartupError) as caught:
        resolve(path)
    for word in words:
        assert word in caught.value.message


def test_missing_path_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no model at")
    refused("missing.gguf", "there is no model at")


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "config.json")


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors")


def test_pickled_weights_are_refused_as_unsafe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pickled", ".safetensors")


def test_folder_of_a_gguf_names_the_file_to_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused(tmp_path, str(tmp_path / "m.gguf"))


def test_weight_file_instead_of_folder_is_refused(tmp_path: Path) -> None:
    refused(write_folder(tmp_path / "m") / "model.safetensors", "pass its folder")


def test_broken_config_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type":')
    refused(folder, "config.json", "not valid JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json", "object")


def test_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(write_folder(tmp_path / "m", quantization_config={"quant_method": "awq"}), "'awq'")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path / "m", tensors_of("llama"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing")


def test_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path / "m", tensors_of("llama"))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../other.safetensors"}}')
    refused(folder, "outside its folder")


def test_unreadable_index_is_refused(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path / "m", tensors_of("llama"))
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "not a readable index")


def test_tensor_that_the_index_promises_must_be_there(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path / "m", tensors_of("llama"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "lacks tensor 'extra'")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path / "m", tensors_of("llama"))
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    refused(folder, "is in both")


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 100_000])
def test_truncated_file_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    file = write_folder(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    refused(tmp_path / "m", str(file), "truncated", "download it again")


def test_corrupt_header_is_refused(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "m") / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"not json at "
    file.write_bytes(content)
    refused(tmp_path / "m", str(file), "corrupt header")


def test_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "m") / "model.safetensors"
    file.write_bytes(b"version https://git-lfs\noid sha256:0\nsize 1\n")
    refused(tmp_path / "m", "git lfs pull")


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(StartupError, match="I8"):
        load_weights(resolve(folder), torch.float32)
