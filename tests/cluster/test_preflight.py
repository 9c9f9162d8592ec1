"""What is wrong in the configuration is said before Ray is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.compose import open_model
from cluster.config import load_config
from cluster.preflight import check_before_start, check_configuration, warnings_of
from cluster.threads import threads_per_rank
from engine.model.config import ModelConfig
from protocol.errors import StartupError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("smollm2", tmp_path_factory.mktemp("models"))


def test_engines_divide_the_cores_between_all_that_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = load_config(None, {"decode.autoscaling.max_workers": 3})
    assert threads_per_rank(config, config.decode) == 2


def test_ranks_divide_the_cores_as_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = load_config(None, {"prefill.tensor_parallel_size": 2, "decode.pipeline_parallel_size": 2})
    assert threads_per_rank(config, config.decode) == 2


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
        ({"decode__num_blocks": 3}, "decode.num_blocks is 3"),
        ({"decode__tensor_parallel_size": 64}, "decode workers: .* lower tensor_parallel_size to"),
        ({"pipeline_parallel_size": 64}, "prefill workers: .* lower pipeline_parallel_size to"),
        ({"tensor_parallel_size": 2, "ranks__expert_parallel": True}, "no experts to deal out"),
        ({"pipeline_parallel_size": 2, "ranks__expert_parallel": True}, "no experts to deal out"),
    ],
)
def test_bad_values_name_their_key(model: Path, changes: dict[str, object], says: str) -> None:
    config = tiny_config(model, **changes)
    with pytest.raises(StartupError, match=says):
        check_before_start(config, open_model(config))


def test_each_rank_needs_an_expert_where_whole_ones_are_dealt_out(tmp_path: Path) -> None:
    mixture = tiny_model("mixtral", tmp_path, num_attention_heads=8)
    for experts_are_whole in (False, True):
        config = tiny_config(mixture, tensor_parallel_size=8, ranks__expert_parallel=experts_are_whole)
        if experts_are_whole:
            with pytest.raises(StartupError, match="4 experts, which 8 ranks cannot share"):
                check_before_start(config, open_model(config))
        else:
            check_before_start(config, open_model(config))


def test_memory_for_exactly_the_longest_sequence_is_enough(model: Path) -> None:
    """What the engine demands when it is loaded, found without loading it."""
    config = tiny_config(model, max_model_len=161, decode__num_blocks=11)
    check_before_start(config, open_model(config))
    config = tiny_config(model, max_model_len=162, decode__num_blocks=11)
    with pytest.raises(StartupError, match="takes 12 blocks"):
        check_before_start(config, open_model(config))
    element_bytes = 4
    shape = ModelConfig.from_hf(open_model(config).config)
    block_bytes = shape.num_layers * 2 * shape.num_kv_heads * 16 * shape.head_dim * element_bytes
    for more, fits in ((0, True), (-1, False)):
        memory = {"decode__num_blocks": None, "decode__kv_cache_memory": 12 * block_bytes + more}
        config = tiny_config(model, max_model_len=162, **memory)
        if fits:
            check_before_start(config, open_model(config))
        else:
            with pytest.raises(StartupError, match=r"decode\.kv_cache_memory"):
                check_before_start(config, open_model(config))


def test_a_transport_within_one_process_is_refused_before_anything_is_started() -> None:
    with pytest.raises(StartupError, match=r"kv_transfer\.transport is loopback.* nixl"):
        check_configuration(load_config(None, {"kv_transfer.transport": "loopback"}))


@pytest.mark.parametrize(
    ("transport", "num_gpus", "complaint"),
    [
        ("nccl", (0, 0), r"nccl.*num_gpus.*nixl or gloo"),
        ("nccl", (1, 0), r"nccl.*num_gpus"),
        ("gloo", (1, 1), r"gloo.*host memory.*nixl or nccl"),
        ("gloo", (0, 1), r"gloo"),
        ("gloo", (0, 0), None),
        ("nccl", (1, 1), None),
    ],
)
def test_a_transport_for_other_memory_is_refused_before_anything_is_started(
    transport: str, num_gpus: tuple[int, int], complaint: str | None
) -> None:
    gpus = dict(zip(("prefill.num_gpus", "decode.num_gpus"), num_gpus, strict=True))
    config = load_config(None, {"kv_transfer.transport": transport, **gpus})
    if complaint is None:
        check_configuration(config)
    else:
        with pytest.raises(StartupError, match=complaint):
            check_configuration(config)


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(tmp_path))
    (warning,) = warnings_of(load_config(None))
    assert "no C++ compiler (g++, clang++, c++)" in warning
    compiler = tmp_path / "clang++"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert warnings_of(load_config(None)) == []


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


def test_a_rank_needs_memory_for_its_own_heads_alone(model: Path) -> None:
    sizes = {"prefill__num_blocks": None, "max_model_len": 161, "prefill__tensor_parallel_size": 2}
    folder = open_model(tiny_config(model))
    shape = ModelConfig.from_hf(folder.config)
    assert shape.num_kv_heads == 2
    least = 11 * shape.num_layers * 2 * 1 * 16 * shape.head_dim * 4
    check_before_start(tiny_config(model, prefill__kv_cache_memory=least, **sizes), folder)
    with pytest.raises(StartupError, match="a sequence of max_model_len"):
        check_before_start(tiny_config(model, prefill__kv_cache_memory=least - 1, **sizes), folder)


def test_checksums_are_refused_where_a_worker_has_several_ranks() -> None:
    with pytest.raises(StartupError, match="decode workers have 2 ranks: leave it out"):
        load_config(None, {"kv_transfer.checksum": True, "decode.tensor_parallel_size": 2})
