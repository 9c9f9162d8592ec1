"""What is wrong in the configuration is said before Ray is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.compose import open_model
from cluster.preflight import check_before_start
from protocol.errors import StartupError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("smollm2", tmp_path_factory.mktemp("models"))


def test_a_good_configuration_passes(model: Path) -> None:
    config = tiny_config(model)
    check_before_start(config, open_model(config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_model_len": 100_000}, "max_model_len is 100000"),
        ({"http__api_key_file": "/no/such/key"}, "api_key_file"),
        ({"prefill__num_blocks": None, "prefill__kv_cache_memory": "1KiB"}, "prefill.kv_cache_memory"),
        ({"decode__num_blocks": None, "decode__kv_cache_memory": "1KiB"}, "decode.kv_cache_memory"),
    ],
)
def test_bad_values_name_their_key(model: Path, changes: dict[str, object], says: str) -> None:
    config = tiny_config(model, **changes)
    with pytest.raises(StartupError, match=says):
        check_before_start(config, open_model(config))


def test_an_unsupported_architecture_and_a_missing_tokenizer_are_found(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "tokenizer.json").unlink()
    config = tiny_config(copy)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        check_before_start(config, open_model(config))
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**fields, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(StartupError, match="GPT2LMHeadModel"):
        check_before_start(config, open_model(config))
