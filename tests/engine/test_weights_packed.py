"""Packed weights in a file: the same bits as packed anew, whole or not used, and shared between workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpp_variants import best_ops, variant_ops
from tiny_models import CPU, BlockDealer, Twins, generate, make_prompt, make_twins

from engine.model import DecoderModel
from engine.model.weights import Part, assemble, packed_parts
from engine.ops import Linear, Ops, TorchOps
from engine.ops.cpu.instruction_sets import INSTRUCTION_SETS
from engine.ops.cpu.ops import PACKING_VERSION
from engine.weights.packed import shared_parts
from engine.weights.packed_file import map_parts, write_parts
from protocol.errors import StartupError

KEY = {"revision": "r1", "dtype": "bfloat16", "packing": "avx2-v1"}
PARTS: dict[str, Part] = {
    "norm": torch.arange(7, dtype=torch.float32),
    "plain": Linear(torch.randn(3, 5, 8, 2).to(torch.bfloat16), None, 21),
    "biased": Linear(torch.randn(1, 2, 8, 1), torch.randn(1, 8), 5),
}


class Maker:
    """Gives PARTS and counts how often it had to."""

    num_calls = 0

    def __call__(self) -> Iterator[tuple[str, Part]]:
        self.num_calls += 1
        yield from PARTS.items()


def assert_same(found: Mapping[str, Part]) -> None:
    assert list(found) == list(PARTS)
    for name, part in PARTS.items():
        got = found[name]
        if isinstance(part, torch.Tensor):
            assert isinstance(got, torch.Tensor)
            assert torch.equal(got, part)
            continue
        assert isinstance(got, Linear)
        assert torch.equal(got.weight, part.weight)
        assert got.weight.dtype is part.weight.dtype
        assert got.out_features == part.out_features
        assert (got.bias is None) == (part.bias is None)
        if part.bias is not None and got.bias is not None:
            assert torch.equal(got.bias, part.bias)


def only_file(folder: Path) -> Path:
    (file,) = (file for file in folder.iterdir() if not file.name.endswith(".lock"))
    return file


def test_parts_are_made_once_and_mapped_ever_after(tmp_path: Path) -> None:
    maker = Maker()
    for _ in range(3):
        assert_same(shared_parts(tmp_path, KEY, maker))
    assert maker.num_calls == 1
    assert only_file(tmp_path).name == "r1-bfloat16-avx2-v1.weights"


@pytest.mark.parametrize("field", KEY)
def test_another_model_type_or_cpu_has_a_file_of_its_own(tmp_path: Path, field: str) -> None:
    maker = Maker()
    shared_parts(tmp_path, KEY, maker)
    shared_parts(tmp_path, {**KEY, field: "other"}, maker)
    assert maker.num_calls == 2


def test_workers_that_start_at_once_write_one_file(tmp_path: Path) -> None:
    maker = Maker()
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: shared_parts(tmp_path, KEY, maker), range(8)):
            assert_same(found)
    assert maker.num_calls == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "truncated"),
        (lambda content: content[:-1], "truncated"),
        (lambda content: content[: len(content) // 2], "truncated"),
        (lambda content: content + b"x", "truncated"),
        (lambda content: b"other file" + content[10:], "no file of packed weights"),
        (lambda content: content[:-9] + b"9" + content[-8:], "damaged"),
        (lambda content: content.replace(b'"r1"', b'"r2"'), "damaged"),
    ],
)
def test_damaged_file_is_told_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    maker = Maker()
    shared_parts(tmp_path, KEY, maker)
    file = only_file(tmp_path)
    assert callable(damage)
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert_same(shared_parts(tmp_path, KEY, maker))
    assert maker.num_calls == 2
    assert any(reason in message for message in caplog.messages)
    assert_same(map_parts(file, KEY))


def test_file_of_another_key_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path / "file", KEY, PARTS.items())
    with pytest.raises(StartupError, match="was made for"):
        map_parts(tmp_path / "file", {**KEY, "packing": "avx512-v1"})


def test_cache_that_cannot_be_written_costs_memory_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert_same(shared_parts(tmp_path / "file" / "folder", KEY, Maker()))
    assert len(caplog.messages) == 1


def test_failed_packing_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Part]]:
        yield "norm", torch.zeros(1)
        raise StartupError("the checkpoint lacks a weight")

    with pytest.raises(StartupError, match="lacks a weight"):
        shared_parts(tmp_path, KEY, broken)
    assert not [file for file in tmp_path.iterdir() if not file.name.endswith(".lock")]


def test_mapped_parts_take_no_memory_of_the_process(tmp_path: Path) -> None:
    big: dict[str, Part] = {"weight": torch.ones(1 << 20)}
    (found,) = shared_parts(tmp_path, KEY, big.items).values()
    assert isinstance(found, torch.Tensor)
    assert float(found.sum()) == 1 << 20
    lines = Path("/proc/self/smaps").read_text("utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if str(tmp_path) in line)
    mapped = dict(line.split(":", 1) for line in lines[at + 1 : at + 20])
    assert int(mapped["Rss"].split()[0]) >= 4096
    assert int(mapped["Anonymous"].split()[0]) == 0


def on_file(twins: Twins, ops: Ops, folder: Path) -> DecoderModel:
    config, dtype = twins.config, twins.model.dtype
    checkpoint = twins.reference.state_dict()
    key = {"revision": "tiny", "dtype": str(dtype), "packing": ops.packing or ""}
    parts = shared_parts(folder, key, lambda: packed_parts(config, checkpoint, ops, CPU, dtype))
    return DecoderModel(config, assemble(config, parts), ops, device=CPU, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["smollm2", "llama_biased", "qwen2", "qwen3"])
def test_model_on_mapped_weights_gives_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    twins = make_twins(kind, dtype, best_ops(dtype))
    mapped = Twins(twins.reference, twins.config, on_file(twins, best_ops(dtype), tmp_path))
    runs = [
        generate(made.new_runner(), [BlockDealer().sequence(make_prompt(40), 4, logprobs=1000)])
        for made in (twins, mapped)
    ]
    assert runs[0] == runs[1]


def test_only_plain_memory_is_kept() -> None:
    assert TorchOps(CPU, torch.float32).packing is None
    known = {f"{instruction_set.name}-v{PACKING_VERSION}" for instruction_set in INSTRUCTION_SETS}
    assert best_ops(torch.float32).packing in known
    assert variant_ops("sixteen-lanes", torch.float32).packing != best_ops(torch.float32).packing


@pytest.mark.parametrize(
    ("variant", "dtype", "expected"),
    [
        ("sixteen-lanes", torch.float32, [0, 100, 200, 300]),
        ("sixteen-lanes", torch.bfloat16, [0, 1, 100, 101]),
    ],
)
def test_version_of_the_packing_is_raised_when_the_packing_changes(
    variant: str, dtype: torch.dtype, expected: list[int]
) -> None:
    """Files of this version are on users' disks. Rows of 2 panels, element (n, k) is 100 n + k."""
    weight = torch.arange(40)[:, None] * 100 + torch.arange(4)
    packed = variant_ops(variant, dtype).pack((weight % 256).to(dtype), None)
    assert PACKING_VERSION == 1
    assert packed.weight.shape == ((2, 4, 32, 1) if dtype is torch.float32 else (2, 2, 32, 2))
    assert packed.weight.view(-1)[:4].tolist() == [value % 256 for value in expected]
    assert packed.weight[1, 0, 8:].count_nonzero() == 0
